#!/usr/bin/env bash
# Check and bench the engine on R = 2, 4 or 8 GPUs:
#   bash bench/sweep.sh R [FOLDER [PART ...]]
# Parts are check, dispatch_combine, fused_layer and low_latency, unless others are named: training,
# trace, quantized_layer, internode, host, model, replays. Each has a time limit, and all that are named
# end after SWEEP_SECONDS, 475 by default. One that fails or runs out of time keeps no other from
# running; the exit status is the number of these. Result lines (*.jsonl) and logs go to FOLDER,
# sweep_output by default.
set -uo pipefail
ranks=${1:?usage: bash bench/sweep.sh R [FOLDER [PART ...]]}
folder=$(realpath -m "${2:-sweep_output}")
shift $(($# < 2 ? $# : 2))
parts=("$@")
((${#parts[@]})) || parts=(check dispatch_combine fused_layer low_latency)
cd "$(dirname "$0")/.."
if [[ -x .venv/bin/python ]]; then : "${PYTHON:=.venv/bin/python}"; fi
: "${PYTHON:=python}"
mkdir -p "$folder"
: "${CUDA_VISIBLE_DEVICES:=$(seq -s, 0 $((ranks - 1)))}"
CUDA_VISIBLE_DEVICES=$(cut -d, -f"-$ranks" <<<"$CUDA_VISIBLE_DEVICES")
export CUDA_VISIBLE_DEVICES PYTHONUNBUFFERED=1 MOE_ENGINE_TEST_RANKS=$ranks

failed=0 end=$((SECONDS + ${SWEEP_SECONDS:-475}))
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
trace() { # forward or backward, options
    local trace=(-m moe_engine trace --model qwen3-30b --tokens 8192 --ranks "$ranks" "${@:2}")
    part "trace_$1" 60 "${trace[@]}" --path "$folder/trace_$1.json" --picture "$folder/trace_$1.png"
}
gpu_tests() { # name, most seconds, tests and options
    part "$1" "$2" -m pytest -q -p no:cacheprovider "${@:3}"
}

for one in "${parts[@]}"; do
    case $one in
    check) gpu_tests check 120 tests/test_eight_ranks.py ;;
    dispatch_combine) bench dispatch_combine 100 --core ;;
    fused_layer) bench fused_layer 130 --core --comet ;;
    low_latency) bench low_latency 240 --core ;;
    training) bench training 180 --policy pre --policy all ;;
    trace)
        trace forward
        trace backward --backward
        ;;
    quantized_layer) bench quantized_layer 90 ;;
    internode) bench internode 120 --nodes "$ranks" ;;
    host) bench host 60 ;;
    model) bench model 150 --batch 8 --batch 32 ;;
    replays) gpu_tests replays 120 tests/test_graph.py -k ten_thousand -m "slow or not slow" ;;
    *)
        echo "no such part: $one"
        ((failed += 1))
        ;;
    esac
done
exit "$failed"
