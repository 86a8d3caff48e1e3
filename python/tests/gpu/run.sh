#!/usr/bin/env bash
# Runs the Python package's GPU tests, and its benchmark, on a machine with a GPU, from a wheel and the command line of the same build:
#
#   python/tests/gpu/run.sh WHEEL COUNTERPOINT [tests|bench|bench=host,rates,fresh,masks]...
#
# The machine needs python3 with PyTorch and pytest; nothing is built or fetched. Kernels are compiled first, side by side. What fails does
# not keep the rest from running; the exit status says whether something did. The benchmark's table comes last.
set -uo pipefail
wheel=$(readlink -f "$1") counterpoint=$(readlink -f "$2")
shift 2
parts=${*:-tests bench}
here=$(cd "$(dirname "$0")" && pwd)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check --target "$site" "$wheel" || exit 2
export PYTHONPATH=$site PYTHONUNBUFFERED=1
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
step "kernels" warm
for part in $parts; do
    case $part in
    tests) step "tests" timeout 240 python3 -m pytest -q --durations=8 --tb=short -p no:cacheprovider "$here" ;;
    bench) step "benchmark" timeout 200 python3 "$here/../../benches/attention.py" --counterpoint "$counterpoint" ;;
    bench=*)
        step "benchmark" timeout 200 python3 "$here/../../benches/attention.py" --counterpoint "$counterpoint" --only "${part#bench=}"
        ;;
    *) echo "no part $part"; exit 2 ;;
    esac
done
exit $status
