#!/usr/bin/env bash
# Everything that must hold before a change lands: format, lints, tests, examples, documentation.
# Runs on a bare Debian machine with Rust; installs the headless browser that the report's tests look through.
set -euo pipefail
cd "$(dirname "$0")"

if ! command -v chromium >/dev/null; then
    echo "== installing chromium (the report's tests open it headless)"
    if [ "$(id -u)" = 0 ]; then as_root=(); else as_root=(sudo); fi
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
fi

step() { echo "== $*"; "$@"; }
step cargo fmt --all --check
step cargo clippy --workspace --all-targets --locked -- -D warnings
step cargo test --workspace --locked
for example in examples/*/; do
    step cargo run --quiet --locked --example "$(basename "$example")"
done
RUSTDOCFLAGS="-D warnings" step cargo doc --workspace --no-deps --locked --quiet
echo "== all of it passed"
