#!/usr/bin/env bash
# Adds transformers' own server to a report of `bros bench`.
#
#   bash benchmarks/peers/compare_transformers.sh VENV OUT_DIR [options of bros bench]
#
# VENV needs `pip install 'transformers[serving]' accelerate`; vLLM's VENV needs only accelerate. The server has no
# service classes, so there is no S3. Run nothing else on the machine.
set -euo pipefail
venv=${1:?usage: compare_transformers.sh VENV OUT_DIR [options]}
out=${2:?usage: compare_transformers.sh VENV OUT_DIR [options]}
shift 2
venv=$(realpath "$venv")
mkdir -p "$out"
out=$(realpath "$out")
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
model=$out/model
[ -f "$model/config.json" ] || "$python" benchmarks/peers/export_model.py "$model"
mkdir -p "$out/hub"  # /v1/models lists its content, and fails without it
HF_HUB_CACHE=$out/hub HF_HUB_OFFLINE=1 "$venv/bin/transformers" serve "$model" --device cpu --dtype float32 --port 8101 \
  --continuous-batching > "$out/transformers.log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
until curl -sf http://127.0.0.1:8101/health > /dev/null; do
  kill -0 "$server" || { tail -5 "$out/transformers.log"; exit 1; }
  sleep 2
done
# Warm-up: its first response takes half a minute.
curl -sf http://127.0.0.1:8101/v1/completions -H 'content-type: application/json' \
  -d "{\"model\": \"$model\", \"prompt\": \"Hello\", \"max_tokens\": 8}" > /dev/null
"$python" -m bros bench --append --out "$out" --target http://127.0.0.1:8101 \
  --dialect transformers --endpoint chat --target-model "$model" --scenarios S0,S1,S2 --seed 1 \
  --rates 0.25 --in-flight 16 --longest-prompt 200 --duration 120 --warm-up 20 --context 2048 "$@"
