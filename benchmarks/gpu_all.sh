#!/usr/bin/env bash
# All that needs a GPU, in less than nine minutes: the tests, then the measurements.
#
#   [PYTHON=python3] [COMMIT=...] benchmarks/gpu_all.sh FOLDER
#
# Each has a time limit, and what it printed and measured until then is in FOLDER.
set -uo pipefail
folder=$(mkdir -p "${1:?usage: benchmarks/gpu_all.sh FOLDER}" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
commit=${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD

step() { # name, seconds, command ...
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    echo "== $name"
    timeout --kill-after=5 "$limit" "$@" >"$folder/$name.log" 2>&1
    local status=$?
    tail -n "${LINES_SHOWN:-60}" "$folder/$name.log"
    echo "== $name: status $status, $((SECONDS - began)) s"
}

step doctor 40 "$python" -m bros doctor
step tests 170 make test-gpu PYTHON="$python" ARGS="-p no:cacheprovider"
step tune 95 "$python" benchmarks/gpu_speed.py --parts tune --json "$folder/gpu_tune.json"
cp bros/kernels/triton/tuned/*.json "$folder" 2>/dev/null
step speed 225 "$python" benchmarks/gpu_speed.py --budget 0.5 --commit "$commit" --json "$folder/gpu_speed.json"
