#!/usr/bin/env bash
# Check and bench dispatch and combine, the fused layer, and low latency on R GPUs, in under 8 minutes:
#   bash bench/sweep.sh R [FOLDER]
# Result lines (*.jsonl) and logs go to FOLDER, sweep_output by default. A part that fails or runs out of
# its time keeps no other from running; the exit status is the number of these.
set -uo pipefail
ranks=${1:?usage: bash bench/sweep.sh R [FOLDER]}
folder=$(realpath -m "${2:-sweep_output}")
cd "$(dirname "$0")/.."
if [[ -x .venv/bin/python ]]; then : "${PYTHON:=.venv/bin/python}"; fi
: "${PYTHON:=python}"
mkdir -p "$folder"
CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((ranks - 1)))
export CUDA_VISIBLE_DEVICES PYTHONUNBUFFERED=1

failed=0
part() { # name, seconds, command
    local log=$folder/$1.log since=$SECONDS status=0
    timeout --kill-after 5 "$2" "$PYTHON" "${@:3}" >"$log" 2>&1 || status=$?
    echo "$1: exit $status after $((SECONDS - since)) s, $log"
    if ((status)); then
        tail -n 20 "$log"
        ((failed += 1))
    fi
}
bench() { # name, seconds, options
    part "$1" "$2" "bench/$1.py" --ranks "$ranks" --path "$folder/$1.jsonl" "${@:3}"
}

part check 100 -m pytest -q tests/test_eight_ranks.py
bench dispatch_combine 80 --core
bench fused_layer 110 --core --comet
bench low_latency 190 --core
exit "$failed"
