#!/usr/bin/env bash
# Everything that must hold before a change lands: format, lints, tests, examples, documentation.
# Runs on a bare Debian machine with Rust; installs the headless browser that the report's tests look through, Open MPI for the
# transport over it, and below target/ the compiler of the CUDA kernels. No GPU is needed.
set -euo pipefail
cd "$(dirname "$0")"

install() {
    echo "== installing $1 ($2)"
    if [ "$(id -u)" = 0 ]; then as_root=(); else as_root=(sudo); fi
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1" >/dev/null
}
command -v chromium >/dev/null || install chromium "the report's tests open it headless"
command -v mpicc >/dev/null || install libopenmpi-dev "the transport over MPI is built against it"
command -v mpirun >/dev/null || install openmpi-bin "its tests run under it"
# Not libclang-cpp, which LLVM brings along.
compgen -G '/usr/lib/llvm-*/lib/libclang[-.][0-9s]*' >/dev/null || install libclang-dev "the bindings of MPI are made with it"

# NVRTC compiles every kernel in the tests; nvdisasm is what machine code is compared with. A folder that is named already
# is taken as it is.
if [ -z "${COUNTERPOINT_NVRTC_DIR:-}" ]; then
    wheels=(nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-nvdisasm==13.5.37)
    folder=$PWD/target/nvidia
    if [ "$(cat "$folder/wheels.txt" 2>/dev/null)" != "${wheels[*]}" ]; then
        python3 -m pip --version >/dev/null 2>&1 || install python3-pip "it fetches the compiler of the kernels"
        echo "== fetching ${wheels[*]}"
        rm -rf "$folder"
        if python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps \
            --target "$folder" "${wheels[@]}"; then
            echo "${wheels[*]}" >"$folder/wheels.txt"
        elif [ -n "${CI:-}" ]; then
            exit 1
        else
            echo "== SKIPPING all tests that compile kernels: the compiler could not be fetched"
        fi
    fi
    if [ -e "$folder/wheels.txt" ]; then export COUNTERPOINT_NVRTC_DIR=$folder/nvidia/cu13/lib; fi
fi
export COUNTERPOINT_CACHE_DIR=${COUNTERPOINT_CACHE_DIR:-$PWD/target/cubins}
# Property tests draw the same cases in every run, so that one commit passes everywhere or nowhere. `cargo test` draws others.
export PROPTEST_RNG_SEED=${PROPTEST_RNG_SEED:-29}

# A build that is thrown away keeps nothing for the next one. Panics say where they are without tables of lines, which take a
# sixth of what compiling takes.
if [ -n "${CI:-}" ]; then export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0; fi
# Masks that come and go: all that the group promises.
if [ -n "${CI:-}" ]; then export SOAK_MASKS=${SOAK_MASKS:-10000}; fi

# What each step took is printed at the end; docs/testing.md has the table.
times=()
step() {
    echo "== $*"
    local begin=$SECONDS
    "$@"
    times+=("$((SECONDS - begin)) s  $*")
}
# A step that runs concurrently with those that follow, in a process group of its own; `finish` waits for it, prints what it printed, and fails where it failed.
background=0
log=$(mktemp)
trap '[ "$background" = 0 ] || kill -- "-$background" 2>/dev/null || true; rm -f "$log" "$log.time"' EXIT
begin_beside() {
    echo "== concurrently with what follows: $*"
    set -m
    (
        begin=$SECONDS
        "$@"
        echo "$((SECONDS - begin)) s (concurrently)  $*" >"$log.time"
    ) >"$log" 2>&1 &
    background=$!
    set +m
}
finish() {
    local status=0
    wait "$background" || status=$?
    background=0
    cat "$log"
    [ "$status" = 0 ] || exit "$status"
    times+=("$(cat "$log.time")")
    rm -f "$log.time"
}

# With MPI in one go, so that nothing is compiled twice. What most build is without it: the crate that has it is linted so, too.
features=counterpoint-exec/mpi,counterpoint-cli/mpi
with_mpi=(--workspace --features "$features" --locked)
export COUNTERPOINT_FEATURES=$features
# PyTorch comes over the network while everything is compiled.
begin_beside python/test.sh --install
step cargo fmt --all --check
step cargo clippy "${with_mpi[@]}" --all-targets -- -D warnings
step cargo clippy -p counterpoint-exec --locked -- -D warnings
step cargo test "${with_mpi[@]}" --no-run
finish
# What the tests of Rust were built from is not compiled again.
step python/test.sh --build
if cargo nextest --version >/dev/null 2>&1; then
    # Tests that compare times run first, with the machine to themselves. Of the others many wait for most of their time: those of all
    # crates run at the same time, more of them than there are cores, with those of Python besides; none runs for long unseen.
    timed='test(overlap::) | test(interleaved_ranks) | test(takes_less_than) | test(quicker) | test(link_is_hidden)'
    step cargo nextest run "${with_mpi[@]}" -E "$timed"
    begin_beside python/test.sh
    step cargo nextest run "${with_mpi[@]}" -E "not ($timed)" --test-threads $(($(nproc) + ($(nproc) + 1) / 2))
    step cargo test "${with_mpi[@]}" --doc
else
    # Compiling nextest would take longer than it saves.
    step cargo test "${with_mpi[@]}"
    begin_beside python/test.sh
fi
for example in examples/*/; do
    # Built with the tests.
    step "${CARGO_TARGET_DIR:-target}/debug/examples/$(basename "$example")"
done
RUSTDOCFLAGS="-D warnings" step cargo doc "${with_mpi[@]}" --no-deps --quiet
finish
printf '%s\n' "${times[@]}"
echo "== all of it passed"
