#!/usr/bin/env bash
# Every GPU figure of the project, on a machine with an NVIDIA GPU, without network:
#   benchmarks/gpu_suite.sh [--wheels DIR] [--minutes 9] [--only SECTION ...] [--work DIR] [--results DIR]
# Wheels of DIR are unpacked beside the environment, not into it; those of DIR/peers are seen by peers alone.
# A second start goes on where the first ended. Outside of git, REMAT_COMMIT says which commit this is.
# --device cpu rehearses with a tiny shape.
set -euo pipefail
started=$(date +%s)
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
work=outputs/gpu_suite
wheels=""
rest=()
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=$2; shift 2 ;;
        --work) work=$2; rest+=(--work "$2"); shift 2 ;;
        *) rest+=("$1"); shift ;;
    esac
done
mkdir -p "$work"
site=$(cd "$work" && pwd)/site
unpack() { # WHEELS SITE
    [ ! -e "$2/complete" ] && ls "$1"/*.whl >/dev/null 2>&1 || return 0
    rm -rf "$2"
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check --target "$2" "$1"/*.whl
    touch "$2/complete"
}
if [ -n "$wheels" ]; then
    unpack "$wheels" "$site"
    unpack "$wheels/peers" "$site-peers"
fi
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PATH="$site/bin:$PATH"
"$python" -m remat.cli doctor --build cpu_adam || echo "what is NOT ok above may fail some points"
exec "$python" -m benchmarks.suite.budget --started "$started" ${rest[@]+"${rest[@]}"}
