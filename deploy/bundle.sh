#!/usr/bin/env bash
# Makes a folder that runs on any x86-64 Linux with glibc 2.36 or newer: programs in bin/, every
# shared library that they and the modules need in lib/, but glibc's and CUDA's.
#   deploy/bundle.sh BUILD_FOLDER OUTPUT_FOLDER PROGRAM...
# Programs are paths below the build folder. The CUDA module and the golden answers of the
# conformance suite come along where they have been built. Set LD_LIBRARY_PATH to lib/ and to the
# folders of cuDNN and the CUDA runtime to start a program.
set -euo pipefail

build=$(realpath "$1")
output=$2
shift 2

rm -rf "$output"
mkdir -p "$output/bin" "$output/lib"
for program in "$@"; do
  install -s -m 755 "$build/$program" "$output/bin/"
done
if [[ -e $build/lib/libattnd_cuda.so ]]; then
  install -s -m 755 "$build/lib/libattnd_cuda.so" "$output/lib/"
fi
if [[ -e $build/tests/conformance/golden.bin ]]; then
  cp "$build/tests/conformance/golden.bin" "$output/"
fi

# Names and paths that ldd found, without those that the other machine brings.
glibc='^(linux-vdso|ld-linux-x86-64|libc|libm|libdl|libpthread|librt|libresolv)\.so'
cuda='^lib(cudart|cudnn|cudnn_graph|nvrtc|cuda)\.so'
shopt -s nullglob
ldd "$output"/bin/* "$output"/lib/libattnd_cuda.so |
  awk '$2 == "=>" && $3 ~ /^\// { print $1, $3 }' | sort -u |
  while read -r name path; do
    if [[ ! $name =~ $glibc && ! $name =~ $cuda ]]; then
      install -s -m 644 "$(realpath "$path")" "$output/lib/$name"
    fi
  done
du -sh "$output"
