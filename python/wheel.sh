#!/usr/bin/env bash
# Builds the wheel that is published, and checks it: for any x86-64 Linux with glibc 2.17 and Python 3.10 or newer, with the command
# line in it, and without a path of this machine. It is written to target/wheels.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=("maturin==1.16.0" "cargo-zigbuild==0.24.0" "ziglang==0.15.2")
glibc=2.17
target=${CARGO_TARGET_DIR:-$PWD/target}
environment=$target/wheel-tools
if [ "$(cat "$environment/installed.txt" 2>/dev/null)" != "${tools[*]}" ]; then
    rm -rf "$environment"
    python3 -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "${tools[@]}"
    echo "${tools[*]}" >"$environment/installed.txt"
fi
export PATH=$environment/bin:$PATH

# Panics say where they are: in a crate, not on this machine.
cargo_home=${CARGO_HOME:-$HOME/.cargo}
export RUSTFLAGS="--remap-path-prefix=$PWD=counterpoint --remap-path-prefix=$cargo_home=cargo --remap-path-prefix=$(rustc --print sysroot)=rust"
export CARGO_PROFILE_RELEASE_STRIP=true
platform=x86_64-unknown-linux-gnu
cargo-zigbuild build --release --locked --package counterpoint-cli --target "$platform.$glibc"

# By its name maturin finds this folder, and takes what lies in it into the wheel.
data=counterpoint._native.data
trap 'rm -rf "$data"' EXIT
mkdir -p "$data/scripts"
install -m 755 "$target/$platform/release/counterpoint" "$data/scripts/counterpoint"
rm -rf "$target/wheels"
maturin build --release --locked --zig --compatibility manylinux_2_17 --target "$platform" --out "$target/wheels"
"$environment/bin/python" python/tests/check_wheel.py "$target"/wheels/*.whl "$PWD" "$cargo_home" "$HOME"
