#!/usr/bin/env bash
# Runs the Python package's GPU tests and benchmarks on a machine with GPUs, from a wheel and the command line of the same build:
#
#   python/tests/gpu/run.sh [--out FOLDER] WHEEL COUNTERPOINT [PART]...
#
# With one GPU, in about 5 minutes (what runs without parts):
#   tests             all tests; those that need two GPUs are skipped where there is one
#   bench[=PARTS]     python/benches/attention.py: all of it, or of host,rates,fresh,masks
# With two and more, a rank each under torchrun, in about 5 minutes together:
#   ranks             tests of ranks with GPUs of their own
#   long[=COUNT]      masks that come and go, calls concurrently with NCCL's collectives, COUNT (10,000) of each; ranks that are killed
#   training[=STEPS]  python/benches/training.py: loss curves of all ways to share a small Llama out
#   cp[=OPTIONS]      python/benches/context_parallel.py, compared with the command line and PyTorch's ways; such as cp=--tokens=8192
#   tp                python/benches/tensor_parallel.py, compared with Megatron's way and async-TP
#   fresh             python/benches/fresh_masks.py, fresh_routings.py: what a mask or a routing costs that nobody has seen
#
# The machine needs python3 with PyTorch and pytest, `training` transformers too; nothing is built or fetched. What fails or takes too long
# does not keep the rest from running; the exit status says whether something did. Tables come last. FOLDER gets results as JSON.
set -uo pipefail
out=
if [ "$1" = --out ]; then
    mkdir -p "$2"
    out=$(readlink -f "$2")
    shift 2
fi
wheel=$(readlink -f "$1") counterpoint=$(readlink -f "$2")
shift 2
parts=${*:-tests bench}
here=$(cd "$(dirname "$0")" && pwd)
benches=$here/../../benches
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check --target "$site" "$wheel" || exit 2
# No multicast object is made, which a host may not allow.
export PYTHONPATH=$site PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
cd "$site" || exit 2
status=0
step() {
    local begin=$SECONDS
    echo "== $1"
    shift
    "$@" || { status=1; echo "== FAILED ($?)"; }
    echo "== $((SECONDS - begin)) s"
}

warm() {
    local ids=()
    for kind in "bfloat16 64" "bfloat16 128" "float16 64" "float16 128"; do
        for deterministic in False True; do
            # shellcheck disable=SC2086
            set -- $kind
            timeout 120 python3 -c "
import torch, counterpoint as cp
q, k, v = (torch.randn(300, 4, $2, device='cuda').to(torch.$1).requires_grad_() for _ in range(3))
cp.flex_attention(q, k, v, cp.Mask.causal(300), deterministic=$deterministic)[0].sum().backward()
torch.cuda.synchronize()
" &
            ids+=($!)
        done
    done
    local failed=0
    for id in "${ids[@]}"; do wait "$id" || failed=1; done
    return $failed
}
tests() { # SECONDS FILES...
    timeout "$1" python3 -m pytest -q --durations=8 --tb=short -p no:cacheprovider "${@:2}"
}
launched() { # SECONDS SCRIPT ARGUMENTS...: tables go to a file, and are shown at the end
    local limit=$1 script=$2
    timeout -k 10 "$((limit + 100))" python3 -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$gpus" "$benches/$script.py" \
        --seconds "$limit" ${out:+--out "$out"} "${@:3}" >"$site/$script.txt"
}
case " $parts " in *" tests "* | *" bench"*) step "kernels" warm ;; esac
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
for part in $parts; do
    options=${part#*=}
    case $part in
    tests) step "tests" tests 300 "$here" ;;
    ranks) step "ranks" tests 150 "$here/test_gpu_ranks.py" ;;
    long) LONG_RUN_COUNT=10000 step "long runs" tests 550 "$here/test_gpu_long_runs.py" ;;
    long=*) LONG_RUN_COUNT=$options step "long runs" tests 550 "$here/test_gpu_long_runs.py" ;;
    training) step "training" launched 100 training ;;
    training=*) step "training" launched 100 training --steps "$options" ;;
    cp) step "context parallel" launched 100 context_parallel --counterpoint "$counterpoint" ;;
    # shellcheck disable=SC2086
    cp=*) step "context parallel" launched 100 context_parallel --counterpoint "$counterpoint" $options ;;
    tp) step "tensor parallel" launched 45 tensor_parallel ;;
    fresh)
        step "fresh masks" launched 60 fresh_masks
        step "fresh routings" launched 45 fresh_routings
        ;;
    bench) step "benchmark" timeout 200 python3 "$benches/attention.py" --counterpoint "$counterpoint" ;;
    bench=*) step "benchmark" timeout 200 python3 "$benches/attention.py" --counterpoint "$counterpoint" --only "$options" ;;
    *) echo "no part $part"; exit 2 ;;
    esac
done
for script in training context_parallel tensor_parallel fresh_masks fresh_routings; do
    if [ -s "$site/$script.txt" ]; then
        echo
        cat "$site/$script.txt"
    fi
done
exit $status
