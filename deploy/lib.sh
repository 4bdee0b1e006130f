# What the scripts of deploy/ and tests/ share. To be sourced by bash; it runs nothing by itself.
# shellcheck shell=bash

ATTND_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ATTND_BUILD=$ATTND_ROOT/build
ATTND_PYTHON=$ATTND_BUILD/venv/bin/python
# Compilers (and tests) at once.
ATTND_JOBS=${ATTND_JOBS:-$(nproc)}

# step TEXT: one line of progress, with the seconds since the script started.
step() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# quietly LOG COMMAND...: runs the command with its output at the end of LOG. Where it fails, the
# last lines of LOG are shown and its status is returned.
quietly() {
  local log=$1 status=0
  shift
  mkdir -p "$(dirname "$log")"
  "$@" >>"$log" 2>&1 </dev/null || status=$?
  if [ "$status" -ne 0 ]; then
    printf 'failed (exit code %d): %s\nthe last lines of %s:\n' "$status" "$*" "$log" >&2
    tail -n 40 "$log" >&2
  fi
  return "$status"
}

# Makes build/venv where there is none that works. CMake and the tests run its Python. It is made
# with Debian's own Python, whichever other comes first on PATH.
make_venv() {
  "$ATTND_PYTHON" -m pip --version >/dev/null 2>&1 && return
  rm -rf "$ATTND_BUILD/venv"
  /usr/bin/python3 -m venv "$ATTND_BUILD/venv"
}

# build_preset PRESET [TARGET...]: configures build/PRESET and builds the targets (none: all).
build_preset() {
  local preset=$1 targets=()
  shift
  [ $# -eq 0 ] || targets=(--target "$@")
  cmake -S "$ATTND_ROOT" --preset "$preset" -DPython3_EXECUTABLE="$ATTND_PYTHON" &&
    cmake --build "$ATTND_BUILD/$preset" --parallel "$ATTND_JOBS" "${targets[@]}"
}
