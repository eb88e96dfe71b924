# docker build --build-arg COMMIT=$(git rev-parse --short HEAD) -t remat .
# docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -v $PWD:/work -v remat:/root/.cache \
#     remat launch recipe=lora model.path=MODEL data.path=FILE
# The volume `remat` keeps DeepSpeed's ops, tokenised data and hub models from one container to the next.
# What was tried of it, and what was not: docs/launch.md, "In a container".
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04

# nvcc of the image and these build DeepSpeed's ops at the first launch
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv g++ make git libaio-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

# what changes rarely comes first
WORKDIR /opt/remat
RUN pip install --no-cache-dir torch==2.13.0
COPY requirements.lock ./
RUN pip install --no-cache-dir -r requirements.lock
COPY pyproject.toml setup.py README.md LICENSE ./
COPY conf conf
COPY recipes recipes
COPY ds_configs ds_configs
COPY remat remat
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

ARG COMMIT=
ENV REMAT_COMMIT=$COMMIT
ENV TORCH_EXTENSIONS_DIR=/root/.cache/torch_extensions
WORKDIR /work
ENTRYPOINT ["remat"]
