#!/usr/bin/env bash
# Installs what is missing, builds, and runs every check and test, without and with sanitizers.
# The last line is "N passed, N failed"; the exit code is 0 only if nothing failed.
#
# usage: run.sh [--release-only] [-R REGEX]
set -euo pipefail
# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/lib.sh"

usage() {
  cat <<TXT
usage: run.sh [--release-only] [-R REGEX]
  --release-only  leave out the build with AddressSanitizer and UndefinedBehaviorSanitizer
  -R REGEX        of ctest's tests only those whose name matches, and no quickstart
Environment: ATTND_JOBS=N compilers and tests at once (default: one for each core).
TXT
}

usage_error() {
  usage >&2
  exit 2
}

presets=(release asan)
filter=()
while [ $# -gt 0 ]; do
  case $1 in
    --release-only) presets=(release) ;;
    -R)
      [ $# -ge 2 ] || usage_error
      filter=(-R "$2")
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

cd "$ATTND_ROOT"
logs=$ATTND_BUILD/test-logs
rm -rf "$logs"
mkdir -p "$logs"
# Any report of a sanitizer ends the program that caused it.
export ASAN_OPTIONS=halt_on_error=1:detect_leaks=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1

passed=0
failed=0
failures=()

summary() {
  local status=$?
  # A command outside any phase ended the script.
  [ "$status" -eq 0 ] || [ "$failed" -gt 0 ] || failed=1
  [ ${#failures[@]} -eq 0 ] || printf 'failed: %s\n' "${failures[@]}"
  printf 'total time %d s\n%d passed, %d failed\n' "$SECONDS" "$passed" "$failed"
  [ "$failed" -eq 0 ] || exit 1
}
trap summary EXIT

# phase NAME COMMAND...: runs the command and says how long it took. A failure counts as one.
phase() {
  local name=$1 start=$SECONDS
  shift
  step "== $name"
  if "$@"; then
    step "== $name: ok, $((SECONDS - start)) s"
    return
  fi
  step "== $name: FAILED, $((SECONDS - start)) s"
  failed=$((failed + 1))
  failures+=("$name")
  return 1
}

# need NAME COMMAND...: a phase that the rest depends on.
need() { phase "$@" || exit 1; }

# check NAME COMMAND...: a phase that counts as one test. The next ones run even if it fails.
check() { if phase "$@"; then passed=$((passed + 1)); fi; }

# The Python packages of the tests, the project's own client among them. Installed again only when
# what they are made from changed.
install_python_packages() {
  local stamp=$ATTND_BUILD/venv/.attnd_packages key
  make_venv || return
  key=$({
    echo "$ATTND_BUILD"
    find tests/requirements*.txt client/python proto/attnd -type f \
      -not -path '*/__pycache__/*' -not -path '*/attnd/v1/*_pb2*' -not -path '*/build/*' \
      -not -path '*.egg-info/*' -print0 | sort -z | xargs -0 sha256sum
  } | sha256sum) || return
  [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$key" ] || return 0
  local pip=("$ATTND_PYTHON" -m pip --disable-pip-version-check install --quiet)
  "${pip[@]}" -r tests/requirements.txt &&
    "${pip[@]}" --no-deps -r tests/requirements-nodeps.txt &&
    "${pip[@]}" ./client/python &&
    echo "$key" >"$stamp"
}

# The client as a user installs it; ctest's own tests use the one of the source tree.
import_python_client() {
  (cd / && "$ATTND_PYTHON" -c 'import attnd; print("attnd from", attnd.__file__)')
}

# run_ctest PRESET: runs the preset's tests and adds their numbers.
run_ctest() {
  local preset=$1 log=$logs/ctest-$1.log status=0 start=$SECONDS bad=0 all=0
  step "== ctest $preset"
  ctest --test-dir "$ATTND_BUILD/$preset" --parallel "$ATTND_JOBS" --output-on-failure \
    --timeout 600 --no-tests=error "${filter[@]}" </dev/null 2>&1 | tee "$log" || status=$?
  # "97% tests passed, 1 tests failed out of 37"
  if ! read -r bad all < <(sed -nE 's/.* ([0-9]+) tests failed out of ([0-9]+).*/\1 \2/p' "$log") ||
    { [ "$status" -ne 0 ] && [ "$bad" -eq 0 ]; }; then
    bad=1
    all=$((all > 0 ? all : 1))
  fi
  passed=$((passed + all - bad))
  failed=$((failed + bad))
  [ "$bad" -eq 0 ] || failures+=("ctest $preset: $bad of $all, see $log")
  step "== ctest $preset: $((all - bad)) of $all passed, $((SECONDS - start)) s"
}

need "install packages" deploy/install_packages.sh
need "install Python packages" quietly "$logs/pip.log" install_python_packages
check "layers self-test" .ci/check_layers --self-test
check "layers" .ci/check_layers
check "installed Python client" import_python_client
check "buf lint" "$ATTND_BUILD/venv/bin/buf" lint proto
check "hadolint" "$ATTND_BUILD/venv/bin/hadolint" Dockerfile
for preset in "${presets[@]}"; do
  if phase "build $preset" quietly "$logs/build-$preset.log" build_preset "$preset"; then
    run_ctest "$preset"
  fi
done
if [ ${#filter[@]} -eq 0 ]; then
  check "quickstart" deploy/quickstart.sh --once
fi
