#!/usr/bin/env bash
# The whole path on this machine: train, stop, resume, report, export, sample. Called by `make demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

ranks=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
if [ "$ranks" -eq 0 ]; then
  ranks=2
  export DS_ACCELERATOR=cpu  # without it DeepSpeed warns in every process that it found no GPU
fi
run_id="demo-$(date +%Y%m%d-%H%M%S)"
run_dir="outputs/tiny_zero3_offload/$run_id"

train() {
  local port
  port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  echo "\$ deepspeed --log_level critical --num_gpus $ranks train.py recipe=tiny_zero3_offload run_id=$run_id $*"
  deepspeed --log_level critical --num_gpus "$ranks" --master_port "$port" train.py recipe=tiny_zero3_offload run_id="$run_id" "$@"
}

echo "== 1 of 4: train half way and stop (exit code 75: stopped, resumable)"
code=0
train train.stop_at=100 || code=$?
[ "$code" -eq 75 ] || exit "$code"

echo "== 2 of 4: resume from the newest complete saved state, evaluate, export"
train resume=auto

echo "== 3 of 4: report"
echo "\$ remat report $run_dir"
remat report "$run_dir"

echo "== 4 of 4: text from the exported model, loaded with plain transformers"
HF_HUB_DISABLE_PROGRESS_BARS=1 python scripts/sample.py "$run_dir/export" "def read_"
