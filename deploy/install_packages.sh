#!/usr/bin/env bash
# Installs the Debian 12 packages that building and testing attnd need. Needs root where one is
# missing; where none is, it does nothing and works offline.
#
# usage: install_packages.sh
set -euo pipefail
# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

packages=(
  # Tools
  ca-certificates ccache cmake g++ git ninja-build pkg-config python3 python3-pip python3-venv
  # The server and its clients
  grpc-proto libabsl-dev libcli11-dev libgrpc++-dev libprotobuf-dev libspdlog-dev
  nlohmann-json3-dev libtomlplusplus-dev protobuf-compiler protobuf-compiler-grpc
  # The CPU backend
  libhwy-dev
  # The bundle
  binutils patchelf xz-utils
  # Tests
  libbenchmark-dev libgmock-dev libgtest-dev
)

[ $# -eq 0 ] || die "install_packages.sh takes no arguments, got: $*"
command -v dpkg-query >/dev/null || die "this is not Debian: dpkg-query is missing"

missing=()
for package in "${packages[@]}"; do
  # An unknown package is a missing one.
  state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) || state=unknown
  [ "$state" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  step "all ${#packages[@]} packages are installed"
  exit 0
fi

system=$(. /etc/os-release && echo "${ID:-unknown} ${VERSION_ID:-}")
[ "$system" = "debian 12" ] ||
  die "this is $system; attnd builds on debian 12, and these packages are missing: ${missing[*]}"
[ "$(id -u)" -eq 0 ] || die "these packages are missing; run as root: apt-get install ${missing[*]}"

step "installing ${#missing[@]} packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt=(apt-get -qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=120)
quietly "$ATTND_BUILD/install_packages.log" "${apt[@]}" update
quietly "$ATTND_BUILD/install_packages.log" \
  "${apt[@]}" install --yes --no-install-recommends "${missing[@]}"
step "installed"
