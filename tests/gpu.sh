#!/usr/bin/env bash
# Runs what needs a GPU, from a bundle, and prints one table of results. The bundle:
#   deploy/bundle.sh BUILD OUTPUT bin/attnd bin/attnctl tests/cuda_device_test tests/support_matrix tests/cuda_attention_bench
#   tests/gpu.sh BUNDLE_FOLDER OUTPUT_FOLDER [test|sanitize|races|server|support|bench|torch]...
# "support" writes OUTPUT_FOLDER/SUPPORT.md; it needs tests/support_matrix in the bundle.
# Needs PyTorch's CUDA wheels (or CUDA_LIBRARIES, a list for LD_LIBRARY_PATH) and a bounded time:
# each step has a limit.
set -uo pipefail

[[ $# -ge 2 ]] || { echo "usage: gpu.sh BUNDLE_FOLDER OUTPUT_FOLDER [STEP]..." >&2; exit 2; }
here=$(realpath "$(dirname "$0")")
bundle=$(realpath "$1")
mkdir -p "$2"
output=$(realpath "$2")
shift 2
steps=("$@")
[[ ${#steps[@]} -gt 0 ]] || steps=(test sanitize races server support bench torch)

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
shards=14
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

# The server as an operator starts it, and attnctl, which compares every answer with the reference
# loop in its own process.
# shellcheck disable=SC2317
served() {
  local address=unix:$PWD/attnd.sock pid result=0 pass layout dtype
  bin/attnd --listen="$address" --backend=cuda --fallback=cpu --device-pool=2GiB \
    --pinned-pool=512MiB >attnd.out 2>attnd.err &
  pid=$!
  listening attnd.out
  export ATTND_ADDRESS=$address
  bin/attnctl health || result=1
  bin/attnctl capabilities
  for pass in forward backward; do
    for dtype in bfloat16 float16 float32; do
      for layout in BS3HD SBH3D BSHD_BS2HD SBHD_SBHD_SBHD BHSD_BHSD_BHSD; do
        checked "$pass" "$layout" "$dtype" --batch=2 --seqlen-q=200 --seqlen-kv=200 || result=1
      done
      for layout in T3HD THD_T2HD THD_THD_THD; do
        checked "$pass" "$layout" "$dtype" --cu-seqlens-q=0,17,200 --cu-seqlens-kv=0,17,200 || result=1
      done
    done
    checked "$pass" BSHD_BS2HD float8_e4m3 --batch=2 --seqlen-q=128 --seqlen-kv=128 || result=1
    checked "$pass" BSHD_BS2HD bfloat16 --batch=2 --seqlen-q=128 --seqlen-kv=128 --dropout=0.2 || result=1
  done
  kill -TERM "$pid"
  wait "$pid" || { echo "FAILED: the server ended with $?"; result=1; }
  cat attnd.err
  # Without a GPU the same program serves on the CPU.
  CUDA_VISIBLE_DEVICES='' timeout -s TERM 3 bin/attnd --listen="$address" >attnd.out 2>attnd.err
  grep 'backend=cpu why=.*NVIDIA' attnd.err || { echo "FAILED:"; cat attnd.err; result=1; }
  return "$result"
}
# Waits for a server; its self-test builds a plan of every kernel family first.
# shellcheck disable=SC2317
listening() {
  for _ in $(seq 600); do grep -q listening "$1" && return; sleep 0.1; done
}
# Both backends, each as a server of its own, asked what they support and made to do it.
# shellcheck disable=SC2317
supported() {
  local backend pids=() result=0
  for backend in cpu cuda; do
    bin/attnd --listen="unix:$PWD/$backend.sock" --backend="$backend" --pinned-pool=1GiB \
      --device-pool=4GiB >"$backend.out" 2>"$backend.err" &
    pids+=($!)
  done
  for backend in cpu cuda; do listening "$backend.out"; done
  bin/support_matrix --target="cpu=unix:$PWD/cpu.sock" --target="cuda=unix:$PWD/cuda.sock" \
    --requests=2 --output="$1/SUPPORT.md" || { echo "FAILED: the matrix"; result=1; }
  for pid in "${pids[@]}"; do kill -TERM "$pid" && wait "$pid" || result=1; done
  return "$result"
}
# shellcheck disable=SC2317
checked() {  # checked PASS LAYOUT DTYPE SIZE...
  local answer
  answer=$(bin/attnctl --json "$1" --layout="$2" --dtype="$3" --heads=4 --kv-heads=4 --head-dim=64 --head-dim-v=64 "${@:4}" \
    --causal=top-left --random --check 2>&1) || { echo "FAILED: $*: $answer"; return 1; }
  echo "| $1 $2 $3 | $(grep -oE '"(backend|engine)": ?"[a-z_]*"' <<<"$answer" | tr '\n' ' ') |"
}
export -f served supported listening checked

for step in "${steps[@]}"; do
  case $step in
    test) run test 540 bash -c sharded ;;
    # A subset: the checker makes kernels many times slower.
    sanitize)
      run sanitize 300 compute-sanitizer --tool memcheck --error-exitcode 9 bin/cuda_device_test \
        --gtest_filter='*/BSHD_BSHD_BSHD_causal_br:*/THD_THD_THD_window:*/PAGED_KV_THD_SBHD_SBHD_none:*/SBH3D_none:*/BS3HD_softcap:*/T3HD_dropout'
      ;;
    # Kernels of our own that share memory within a block.
    races)
      run races 300 compute-sanitizer --tool racecheck --error-exitcode 9 bin/cuda_device_test \
        --gtest_filter='*/BSHD_BSHD_BSHD_softcap:*/THD_THD_THD_dropout'
      ;;
    server) run server 150 bash -c served ;;
    # Nearly every problem is a plan of its own.
    support) run support 540 bash -c "supported '$output'" ;;
    bench) run bench 200 bin/cuda_attention_bench "$output/bench.json" ;;
    torch) run torch 100 python3 "$here/engine/cuda/torch_attention_bench.py" ;;
    *) echo "no step '$step'" >&2; exit 2 ;;
  esac
done

for step in "${steps[@]}"; do
  echo "== $step"
  grep -E '^\||^engine|^WRONG|^cpu:|^cuda:|FAILED|ERROR SUMMARY|PASSED|Error|serving' "$output/$step.log" | cut -c1-300 | tail -80
done
echo "== summary, $(date -u +%F), $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader)"
printf '%s\n' "${summary[@]}"
exit $failed
