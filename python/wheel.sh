#!/usr/bin/env bash
# Builds the wheel that is published, and checks it: for any x86-64 Linux with glibc 2.17 and Python 3.10 or newer, without a path of
# this machine. It is written to target/wheels.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=("maturin==1.16.0" "ziglang==0.15.2" "zopfli==0.4.3")
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
# Smaller by a fifth, and on CPU ranks as fast: each crate is compiled as one, so that its parts share what they make of generic code.
export CARGO_PROFILE_RELEASE_CODEGEN_UNITS=1 CARGO_PROFILE_RELEASE_OPT_LEVEL=2
rm -rf "$target/wheels"
maturin build --release --locked --zig --compatibility manylinux_2_17 --target x86_64-unknown-linux-gnu \
    --compression-level 9 --out "$target/wheels"
# By 3 % smaller again; pip reads it as any other.
"$environment/bin/python" python/smaller_wheel.py "$target"/wheels/*.whl
"$environment/bin/python" python/tests/check_wheel.py "$target"/wheels/*.whl "$PWD" "$cargo_home" "$HOME"
