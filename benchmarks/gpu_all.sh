#!/usr/bin/env bash
# All that needs a GPU: the tests, then the measurements.
#
#   [PYTHON=python3] [COMMIT=...] benchmarks/gpu_all.sh FOLDER
#
# Each has a time limit, and what it printed and measured until then is in FOLDER. The limits:
# doctor 75 s, tests 165 s, tune 85 s, speed 225 s, together 550 s.
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

step doctor 75 "$python" -m bros doctor

# As `make test-gpu`, for machines without make. The tests end before they are killed, so that what
# failed is said; warnings of libraries that meet a GPU are no errors; one that hangs says where.
mapfile -t tests < <(grep -rl 'mark[.]gpu' --include='test_*.py' tests)
step tests 165 "$python" -m pytest -m gpu -W default --session-timeout=150 --tb=short \
    -p no:cacheprovider -o faulthandler_timeout=60 "${tests[@]}"

step tune 85 "$python" benchmarks/gpu_speed.py --parts tune --budget 0.2 --json "$folder/gpu_tune.json"
cp bros/kernels/triton/tuned/*.json "$folder" 2>/dev/null
step speed 225 "$python" benchmarks/gpu_speed.py --budget 0.5 --commit "$commit" --json "$folder/gpu_speed.json"
