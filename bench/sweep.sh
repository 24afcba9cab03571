#!/usr/bin/env bash
# Check and bench dispatch and combine, the fused layer, and low latency on R = 2, 4 or 8 GPUs:
#   bash bench/sweep.sh R [FOLDER]
# Result lines (*.jsonl) and logs go to FOLDER, sweep_output by default. It ends after 8 minutes at most:
# each part has a time limit. One that fails or runs out of time keeps no other from running; the exit
# status is the number of these.
set -uo pipefail
ranks=${1:?usage: bash bench/sweep.sh R [FOLDER]}
folder=$(realpath -m "${2:-sweep_output}")
cd "$(dirname "$0")/.."
if [[ -x .venv/bin/python ]]; then : "${PYTHON:=.venv/bin/python}"; fi
: "${PYTHON:=python}"
mkdir -p "$folder"
: "${CUDA_VISIBLE_DEVICES:=$(seq -s, 0 $((ranks - 1)))}"
CUDA_VISIBLE_DEVICES=$(cut -d, -f"-$ranks" <<<"$CUDA_VISIBLE_DEVICES")
export CUDA_VISIBLE_DEVICES PYTHONUNBUFFERED=1 MOE_ENGINE_TEST_RANKS=$ranks

failed=0 end=$((SECONDS + 475))
part() { # name, most seconds, command
    local log=$folder/$1.log since=$SECONDS status=0 left=$((end - SECONDS))
    left=$((left > 0 ? left : 1))
    timeout --kill-after 1 $((left < $2 ? left : $2)) "$PYTHON" "${@:3}" >"$log" 2>&1 || status=$?
    echo "$1: exit $status after $((SECONDS - since)) s, $log"
    if ((status)); then
        tail -n 20 "$log"
        ((failed += 1))
    fi
}
bench() { # name, most seconds, options
    rm -f "$folder/$1.jsonl"
    part "$1" "$2" "bench/$1.py" --ranks "$ranks" --path "$folder/$1.jsonl" "${@:3}"
}

part check 120 -m pytest -q tests/test_eight_ranks.py
bench dispatch_combine 100 --core
bench fused_layer 130 --core --comet
bench low_latency 240 --core
exit "$failed"
