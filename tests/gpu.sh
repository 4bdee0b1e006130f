#!/usr/bin/env bash
# Runs what needs a GPU, from a bundle that deploy/bundle.sh made of cuda_device_test and
# cuda_attention_bench, and prints one table of results.
#   tests/gpu.sh BUNDLE_FOLDER OUTPUT_FOLDER [test|sanitize|bench|torch]...
# Needs PyTorch's CUDA wheels (or CUDA_LIBRARIES, a list for LD_LIBRARY_PATH) and a bounded time:
# each step has a limit.
set -uo pipefail

here=$(realpath "$(dirname "$0")")
bundle=$(realpath "$1")
output=$(realpath "$2")
shift 2
steps=("$@")
[[ ${#steps[@]} -gt 0 ]] || steps=(test sanitize bench torch)

if [[ -z ${CUDA_LIBRARIES:-} ]]; then
  wheels=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])')
  CUDA_LIBRARIES=$wheels/cudnn/lib:$wheels/cu13/lib
fi
export LD_LIBRARY_PATH=$bundle/lib:$CUDA_LIBRARIES
cd "$bundle" || exit 1

summary=()
failed=0
run() {  # run NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS result=passed
  shift 2
  timeout "$limit" "$@" >"$output/$name.log" 2>&1 || { result="failed ($?)"; failed=1; }
  summary+=("$(printf '%-10s %-14s %4d s' "$name" "$result" $((SECONDS - start)))")
}

# The suite in parts, side by side: most of its time goes into building plans.
shards=8
# shellcheck disable=SC2317  # Called through bash -c, for the time limit.
sharded() {
  local shard pids=() result=0
  for ((shard = 0; shard < shards; ++shard)); do
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard bin/cuda_device_test >"shard.$shard.log" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || result=1; done
  cat shard.*.log
  awk -F '\t' '$1 == "ran" || $1 == "refused" { sum[$1] += $2; by[$1 "\t" $3] += $2 }
    END { for (key in by) print "| " key " | " by[key] " |" | "sort"; close("sort");
          print "| all cells: ran " sum["ran"] ", refused " sum["refused"] " |" }' shard.*.log
  return "$result"
}
export -f sharded
export shards

for step in "${steps[@]}"; do
  case $step in
    test) run test 420 bash -c sharded ;;
    # A subset: the checker makes kernels many times slower.
    sanitize)
      run sanitize 150 compute-sanitizer --tool memcheck --error-exitcode 9 bin/cuda_device_test \
        --gtest_filter='*/BSHD_BSHD_BSHD_causal_br:*/THD_THD_THD_window:*/PAGED_KV_THD_SBHD_SBHD_none:*/SBH3D_none'
      ;;
    bench) run bench 200 bin/cuda_attention_bench "$output/bench.json" ;;
    torch) run torch 100 python3 "$here/engine/cuda/torch_attention_bench.py" ;;
    *) echo "no step '$step'" >&2; exit 2 ;;
  esac
done

for step in "${steps[@]}"; do
  echo "== $step"
  grep -E '^\||FAILED|ERROR SUMMARY|PASSED|Error' "$output/$step.log" | cut -c1-300 | tail -80
done
echo "== summary, $(date -u +%F), $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader)"
printf '%s\n' "${summary[@]}"
exit $failed
