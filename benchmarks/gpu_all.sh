#!/usr/bin/env bash
# Everything that needs a GPU: the tests, then the measurements.
#
#   [PYTHON=python3] [COMMIT=...] [SECONDS_IN_ALL=550] benchmarks/gpu_all.sh FOLDER [STEP ...]
#
# STEP: doctor, tests, tune, speed, hybrid (default: all). A step may use the time that earlier steps
# left over. Its output so far is in FOLDER even if it runs out of time. Measured on an H100 with 16
# cores: doctor 45 s, tests 75 s (14 processes), tune 50 s, speed 120 s, hybrid 110 s.
set -uo pipefail
folder=$(mkdir -p "${1:?usage: benchmarks/gpu_all.sh FOLDER [STEP ...]}" && cd "$1" && pwd) || exit 2
steps=("${@:2}")
[ ${#steps[@]} -gt 0 ] || steps=(doctor tests tune speed hybrid)
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
commit=${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD TRITON_INTERPRET=0

declare -A needed=([doctor]=75 [tests]=110 [tune]=85 [speed]=160 [hybrid]=120) # seconds
left=${SECONDS_IN_ALL:-550}
for name in "${steps[@]}"; do
    [ -n "${needed[$name]:-}" ] || { echo "no such step: $name (there are ${!needed[*]})"; exit 2; }
    left=$((left - needed[$name]))
done
[ $left -ge 0 ] || { echo "SECONDS_IN_ALL: ${steps[*]} need $((-left)) s more"; exit 2; }

limit_of() { # seconds for a step, plus the time saved so far or minus the excess
    echo $((needed[$1] + (left > -20 ? left : -20)))
}

step() { # name, command ...
    local name=$1 began=$SECONDS limit
    limit=$(limit_of "$name")
    shift
    echo "== $name, $limit s"
    timeout --kill-after=5 "$limit" "$@" >"$folder/$name.log" 2>&1
    local status=$?
    tail -n "${LINES_SHOWN:-60}" "$folder/$name.log"
    echo "== $name: status $status, $((SECONDS - began)) s"
    left=$((limit - (SECONDS - began)))
}

doctor() {
    step doctor "$python" -m bros doctor
}

# As `make test-gpu`, for machines without make. Tests of the engine run first, because the time may
# not suffice for all kernels. The session timeout ends pytest before it is killed, so that it reports
# failures; library warnings on a GPU are not errors; a test that hangs dumps its stack.
tests() {
    local marked='mark[.]gpu' engine=(tests/executor tests/integration) files
    mapfile -t files < <(grep -rl "$marked" --include='test_*.py' "${engine[@]}"
        grep -rl "$marked" --include='test_*.py' --exclude-dir=executor --exclude-dir=integration tests)
    local processes=()
    "$python" -c 'import xdist' 2>/dev/null && processes=(-n "${TEST_PROCESSES:-14}")
    step tests "$python" -m pytest "${processes[@]}" -m gpu -W default --session-timeout=$(($(limit_of tests) - 15)) \
        --tb=short -p no:cacheprovider -o faulthandler_timeout=60 "${files[@]}"
}

tune() {
    step tune "$python" benchmarks/gpu_speed.py --parts tune --budget 0.2 --json "$folder/gpu_tune.json"
    cp bros/kernels/triton/tuned/*.json "$folder" 2>/dev/null
}

speed() {
    step speed "$python" benchmarks/gpu_speed.py --budget 0.5 --commit "$commit" --json "$folder/gpu_speed.json"
}

hybrid() {
    step hybrid "$python" benchmarks/gpu_hybrid.py --rate 6 --duration 25 \
        --profiles "$folder/profiles" --json "$folder/gpu_hybrid.json"
    cp "$folder"/profiles/*/*.json "$folder" 2>/dev/null
}

for name in "${steps[@]}"; do
    "$name"
done
