#!/usr/bin/env bash
# The wheels that gpu_suite.sh wants on a machine without network that has torch and the usual scientific packages:
#   benchmarks/gpu_wheels.sh DIR [--python 3.12] [--unsloth] [--without-peers] [--list]
# Run it where pip has an index, after `make setup`. DIR gets what requirements.lock pins, less the tools of development,
# what the suite does without (W&B), and the packages that such a machine has; DIR/peers gets those of the peers.
# torchao is the newest that torchtune's last version imports.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?the folder for the wheels}
shift
python=3.12
list=""
peers=(trl torchtune torchao==0.11.0 blobfile kagglehub lxml pycryptodomex)
while [ $# -gt 0 ]; do
    case $1 in
        --python) python=$2; shift 2 ;;
        --unsloth) peers+=(unsloth unsloth_zoo); shift ;;
        --without-peers) peers=(); shift ;;
        --list) list=1; shift ;; # what would be fetched
        *) echo "unknown: $1" >&2; exit 2 ;;
    esac
done
pip="${PYTHON:-.venv/bin/python} -m pip --disable-pip-version-check"
there='numpy|pandas|pyarrow|matplotlib|pillow|contourpy|kiwisolver|fonttools|cycler|pyparsing|sympy|mpmath|networkx'
there+='|setuptools|wheel|packaging|ninja|protobuf|psutil|pyyaml|regex|requests|urllib3|certifi|charset-normalizer'
there+='|idna|filelock|fsspec|jinja2|markupsafe|tqdm|six|python-dateutil|typing-extensions|pytest|pytest-xdist'
there+='|iniconfig|pluggy|execnet|tzdata|safetensors'
unwanted='wandb|hf-xet|ruff|mypy|mypy-extensions|pre-commit|types-.*|hypothesis|bitsandbytes|cwevals|virtualenv'
unwanted+='|nodeenv|identify|cfgv|distlib|librt|ast-serialize|pathspec|sortedcontainers|python-discovery|colorama|httpx2-jsfetch'
abi="cp${python/./}"
platforms=(--platform "linux_$(uname -m)")
for old in 17 24 27 28 31 34 35; do platforms+=(--platform "manylinux_2_${old}_$(uname -m)"); done
platforms+=(--platform "manylinux2014_$(uname -m)")
wanted=$(grep -vE "^(#|($there|$unwanted)==)" requirements.lock | sed 's/ *;.*//')
if [ -n "$list" ]; then
    printf '%s\n' $wanted "${peers[@]+"${peers[@]/#/peers/}"}"
    exit
fi
mkdir -p "$folder"
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
for requirement in ${peers[@]+"${peers[@]}"}; do
    mkdir -p "$folder/peers"
    fetch "$folder/peers" "$requirement" || echo "left out: $requirement"
done
du -sh "$folder"
