#!/usr/bin/env bash
# Makes OUTPUT/, a folder that runs on any x86-64 Linux with glibc 2.36 or newer, wherever it lies,
# and OUTPUT.tar.xz of it: programs in bin/, every shared library that they and the CUDA module need
# in lib/, but glibc's and CUDA's, and the licences of what is in there in licenses/.
#
# usage: bundle.sh BUILD OUTPUT [PROGRAM...]
#
# PROGRAM is a path below BUILD; without any: bin/attnd bin/attnctl. The module comes along where
# BUILD has it, the conformance suite's golden answers where a program of tests/ is named.
#
# Programs start by their path, without LD_LIBRARY_PATH. The module finds CUDA's libraries
# (libcudart.so.13, libnvrtc.so.13, libcudnn.so.9) in lib/nvidia/, where
#   python3 -m pip install --no-deps --target OUTPUT/lib -r OUTPUT/requirements-cuda.txt
# puts them, else along LD_LIBRARY_PATH, else where ldconfig has them. Without them the server runs
# on the CPU.
set -euo pipefail
# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# Names that the other machine brings.
glibc='^(linux-vdso|ld-linux-x86-64|lib(c|m|mvec|dl|pthread|rt|resolv|util|anl))\.so'
cuda='^lib(cudart|cudnn[a-z_]*|nvrtc|cuda)\.so'

[ $# -ge 2 ] || die "usage: bundle.sh BUILD OUTPUT [PROGRAM...]"
command -v patchelf >/dev/null || die "patchelf is missing: run deploy/install_packages.sh"
build=$(realpath "$1")
output=$(realpath -m "$2")
programs=("${@:3}")
[ ${#programs[@]} -gt 0 ] || programs=(bin/attnd bin/attnctl)

# libraries FILE...: "NAME PATH" of each shared library that the files need from here.
libraries() {
  local name path
  ldd "$@" | awk '$2 == "=>" { print $1, $3 == "not" ? "" : $3 }' | sort -u |
    while read -r name path; do
      [[ ! $name =~ $glibc && ! $name =~ $cuda ]] || continue
      [ -n "$path" ] || die "$name is not to be found"
      echo "$name" "$(realpath "$path")"
    done
}

# packages FILE...: the Debian packages that the files are from. Their paths may lack /usr.
packages() {
  { dpkg-query -S "$@" "${@#/usr}" 2>/dev/null || true; } | sed 's/:.*//' | sort -u
}

for program in "${programs[@]}"; do
  [ -x "$build/$program" ] || die "$build/$program is no program"
done
# Nothing is deleted that this script did not make.
if [ -e "$output" ] && [ -n "$(ls -A "$output")" ] && [ ! -e "$output/.attnd-bundle" ]; then
  die "$output is not empty, and no bundle"
fi
rm -rf "$output" "$output.tar.xz"
mkdir -p "$output/bin" "$output/lib" "$output/licenses"
touch "$output/.attnd-bundle"
install -m 644 "$ATTND_ROOT/LICENSE" "$ATTND_ROOT/deploy/requirements-cuda.txt" "$output/"
module=()
if [ -e "$build/lib/libattnd_cuda.so" ]; then
  module=("$output/lib/libattnd_cuda.so")
  install -s -m 755 "$build/lib/libattnd_cuda.so" "${module[0]}"
  # Headers that were compiled into it.
  cp -r "$build"/wheels/nvidia-cudnn-frontend-*/*.dist-info/licenses \
    "$output/licenses/nvidia-cudnn-frontend"
fi
for program in "${programs[@]}"; do
  install -s -m 755 "$build/$program" "$output/bin/"
  case $program in tests/*) cp "$build/tests/conformance/golden.bin" "$output/" ;; esac
done

found=$(libraries "$output"/bin/* "${module[@]}")
paths=()
while read -r name path; do
  install -s -m 644 "$path" "$output/lib/$name"
  paths+=("$path")
done <<<"$found"
for package in $(packages "${paths[@]}"); do
  install -m 644 "/usr/share/doc/$package/copyright" "$output/licenses/$package"
done

# DT_RPATH, not DT_RUNPATH: a program's holds for the libraries that its libraries need too, and
# comes before LD_LIBRARY_PATH, so that no foreign libstdc++ slips in. A library with a RUNPATH of
# its own would be exempt.
# shellcheck disable=SC2016
wheels='$ORIGIN/../lib/nvidia/cudnn/lib:$ORIGIN/../lib/nvidia/cu13/lib'
patchelf --remove-rpath "$output"/lib/*.so*
patchelf --force-rpath --set-rpath "\$ORIGIN/../lib:$wheels" "$output"/bin/* "${module[@]}"

XZ_OPT='-2 -T0' tar -C "$output" --transform='s,^\.,attnd,' --owner=0 --group=0 --numeric-owner \
  --sort=name -cJf "$output.tar.xz" .
mib() { awk -v bytes="$1" 'BEGIN { printf "%.1f MiB", bytes / 1048576 }'; }
echo "$output: $(mib "$(du -sb "$output" | cut -f1)")," \
  "$output.tar.xz: $(mib "$(stat -c %s "$output.tar.xz")")"
