#!/usr/bin/env bash
# The whole path on this machine: train, stop half way, resume, report, export, sample. Called by `make demo`.
#   scripts/demo.sh [option=value ...]     options are added to both launches, for example train.steps=1000
# Runs on every visible GPU (CUDA_VISIBLE_DEVICES), or as two ranks on the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

options=(recipe=tiny_zero3_offload "run_id=demo-$(date +%Y%m%d-%H%M%S)")
plan=$(python scripts/demo_plan.py "${options[@]}" "$@")
read -r ranks stop_at run_dir <<<"$plan"
launch=(remat launch --log-dir "$run_dir.logs")
if [ "$ranks" -eq 0 ]; then
  ranks=2
  export DS_ACCELERATOR=cpu # without it DeepSpeed warns in every process that it found no GPU
  launch+=(--num_gpus "$ranks") # on GPUs this would override CUDA_VISIBLE_DEVICES; without it all visible ones are used
fi
options+=("train.global_batch_size=$((8 * ranks))") # micro-batch 4 x ranks x 2 accumulated

train() {
  echo "\$ ${launch[*]} train.py ${options[*]} $*"
  "${launch[@]}" train.py "${options[@]}" "$@"
}

echo "== 1 of 4: train half way and stop (exit code 75: stopped, resumable)"
code=0
train "train.stop_at=$stop_at" "$@" || code=$?
if [ "$code" -ne 75 ]; then
  echo "scripts/demo.sh: exit code $code instead of 75" >&2
  exit $((code ? code : 1))
fi

echo "== 2 of 4: resume from the newest complete saved state, evaluate, export"
train resume=auto "$@"

echo "== 3 of 4: report"
echo "\$ remat report $run_dir"
remat report "$run_dir"

echo "== 4 of 4: text from the exported model: remat sample $run_dir --raw"
HF_HUB_DISABLE_PROGRESS_BARS=1 remat sample "$run_dir" --raw --prompt "def read_" # it learned from code, not from chats
