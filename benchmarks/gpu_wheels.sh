#!/usr/bin/env bash
# The wheels that gpu_suite.sh wants on a machine without network that has torch and the usual scientific packages:
#   benchmarks/gpu_wheels.sh DIR [--python 3.12] [--without-peers]
# Run it where pip has an index, with the pip that `make setup` made. DIR gets what requirements.lock pins, less the
# tools of development and the large packages that such a machine has; DIR/peers gets the packages of the peers.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?the folder for the wheels}
shift
python=3.12
peers=1
while [ $# -gt 0 ]; do
    case $1 in
        --python) python=$2; shift 2 ;;
        --without-peers) peers=""; shift ;;
        *) echo "unknown: $1" >&2; exit 2 ;;
    esac
done
pip="${PYTHON:-.venv/bin/python} -m pip --disable-pip-version-check"
there='numpy|pandas|pyarrow|matplotlib|pillow|contourpy|kiwisolver|fonttools|cycler|pyparsing|sympy|mpmath|networkx'
there+='|setuptools|wheel|packaging|ninja|protobuf|psutil|pyyaml|regex|requests|urllib3|certifi|charset-normalizer'
there+='|idna|filelock|fsspec|jinja2|markupsafe|tqdm|six|python-dateutil|typing-extensions|pytest|pytest-xdist'
there+='|iniconfig|pluggy|execnet|tzdata|safetensors'
unwanted='ruff|mypy|mypy-extensions|pre-commit|types-.*|hypothesis|bitsandbytes|cwevals|virtualenv|nodeenv|identify'
unwanted+='|cfgv|distlib|librt|ast-serialize|pathspec|sortedcontainers|python-discovery|colorama|httpx2-jsfetch'
abi="cp${python/./}"
platforms=(--platform "linux_$(uname -m)")
for old in 17 24 27 28 31 34 35; do platforms+=(--platform "manylinux_2_${old}_$(uname -m)"); done
platforms+=(--platform "manylinux2014_$(uname -m)")
mkdir -p "$folder"
wanted=$(grep -vE "^(#|($there|$unwanted)==)" requirements.lock | sed 's/ *;.*//')
fetch() { # FOLDER REQUIREMENT...
    local into=$1
    shift
    # shellcheck disable=SC2086
    $pip download --quiet --no-deps --only-binary=:all: --python-version "$python" --implementation cp \
        --abi "$abi" --abi abi3 --abi none "${platforms[@]}" -d "$into" "$@"
}
for requirement in $wanted; do
    case $requirement in
        deepspeed==* | antlr4-python3-runtime==*) # these two come as source, and are pure Python
            DS_BUILD_OPS=0 $pip wheel --quiet --no-deps --no-build-isolation -w "$folder" "$requirement" ;;
        *) fetch "$folder" "$requirement" ;;
    esac
done
if [ -n "$peers" ]; then
    mkdir -p "$folder/peers"
    for requirement in trl torchtune torchao==0.11.0 blobfile kagglehub lxml pycryptodomex unsloth unsloth_zoo; do
        fetch "$folder/peers" "$requirement" || echo "left out: $requirement"
    done
fi
du -sh "$folder"
