#!/usr/bin/env bash
# The same hybrid load on bros and on vLLM's CPU build, one after the other, in one report.
#
#   bash benchmarks/peers/compare_vllm.sh VLLM_VENV OUT_DIR [options of bros bench]
#
# bros runs with each of its policies, vLLM with both of its own. The model is the embedded one in
# fp32; vLLM's first start compiles for some minutes. Run nothing else on the machine.
set -euo pipefail
venv=${1:?usage: compare_vllm.sh VLLM_VENV OUT_DIR [options]}
out=${2:?usage: compare_vllm.sh VLLM_VENV OUT_DIR [options]}
shift 2
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
load=(--rates 0.25 --in-flight 16 --longest-prompt 200 --duration 120 --warm-up 20 --seed 1
      --context 2048 "$@")
model=$out/model
[ -f "$model/config.json" ] || "$python" benchmarks/peers/export_model.py "$model"

"$python" -m bros bench --policies fcfs,priority,rr,bros --out "$out" \
  --weights fp32 --max-model-len 2048 "${load[@]}"

for policy in fcfs priority; do
  # vLLM's defaults except for the sizes of bros; a smaller token budget helps its priority policy.
  budget=()
  [ "$policy" = fcfs ] || budget=(--max-num-batched-tokens 96)
  VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-0-1} VLLM_CPU_KVCACHE_SPACE=2 HF_HUB_OFFLINE=1 "$venv/bin/python" -m vllm.entrypoints.openai.api_server \
    --model "$model" --served-model-name default --dtype float32 --max-model-len 2048 \
    --max-num-seqs 64 --port 8100 --scheduling-policy "$policy" "${budget[@]}" \
    > "$out/vllm_$policy.log" 2>&1 &
  server=$!
  trap 'kill "$server" 2>/dev/null || true' EXIT
  until curl -sf http://127.0.0.1:8100/v1/models > /dev/null; do
    kill -0 "$server" || { tail -5 "$out/vllm_$policy.log"; exit 1; }
    sleep 2
  done
  scenario=$([ "$policy" = fcfs ] && echo S0,S1,S2 || echo S3)
  "$python" -m bros bench --append --out "$out" --target http://127.0.0.1:8100 --dialect vllm \
    --target-name vLLM --target-policy "$policy" --scenarios "$scenario" "${load[@]}"
  kill "$server" && wait "$server" 2>/dev/null || true
done
echo "The report is in $out/report.html"
