#!/usr/bin/env bash
# Everything that must hold of the Python package: formatted, linted, typed, and tested against a real PyTorch, which is installed
# below target/ without the CUDA libraries that it links to: stand-ins are enough where there is no GPU. Arguments go to pytest.
# `--install` only installs PyTorch and the tools, `--build` the module as well. COUNTERPOINT_FEATURES has cargo's features of the
# module, with commas between; none unless it is set.
set -euo pipefail
cd "$(dirname "$0")/.."

torch=2.11.0
packages=("numpy<3" "sympy<2" "networkx<4" "jinja2<4" "fsspec" "filelock" "typing_extensions" "setuptools<82" "transformers==5.17.0" "psutil")
tools=("maturin==1.16.0" "ruff==0.17.5" "mypy==2.4.1" "pytest==9.2.0")
users=("accelerate==1.15.0" "megatron-core==0.16.1")  # without PyTorch's dependencies, which they would bring
target=${CARGO_TARGET_DIR:-$PWD/target}
environment=$target/python
python=$environment/bin/python

install_environment() {
    rm -rf "$environment"
    if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
        if [ "$(id -u)" = 0 ]; then as_root=(); else as_root=(sudo); fi
        "${as_root[@]}" apt-get update -qq
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
    fi
    python3 -m venv "$environment"
    local pip=("$python" -m pip install --quiet --disable-pip-version-check)
    "${pip[@]}" "${tools[@]}" "${packages[@]}"
    "${pip[@]}" --no-deps "torch==$torch"
    "${pip[@]}" --no-deps "${users[@]}"
    "$python" python/tests/stand_ins.py "$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"
    if ! "$python" -c 'import torch'; then
        echo "== PyTorch does not import with stand-ins; installing all of it"
        "${pip[@]}" --force-reinstall "torch==$torch" "setuptools<82"
        "$python" -c 'import torch'
    fi
}
wanted="$torch ${users[*]} ${packages[*]} ${tools[*]} $(cksum <python/tests/stand_ins.py)"
if [ "$(cat "$environment/installed.txt" 2>/dev/null)" != "$wanted" ]; then
    echo "== installing PyTorch $torch and tools into $environment"
    install_environment
    echo "$wanted" >"$environment/installed.txt"
fi
if [ "${1:-}" = --install ]; then exit; fi
export PATH=$environment/bin:$PATH VIRTUAL_ENV=$environment

build=(--locked ${COUNTERPOINT_FEATURES:+--features "$COUNTERPOINT_FEATURES"})
echo "== building counterpoint into it"
maturin develop --quiet "${build[@]}"
if [ "${1:-}" = --build ]; then exit; fi
ruff format --check --quiet python
ruff check --quiet python
mypy
python -m pytest "$@"

# Of the whole, not of tests that were asked for by name.
if [ $# -gt 0 ]; then exit; fi
echo "== a wheel by pip, installed into a fresh environment, as a development build"
fresh=$target/pip-install
trap 'rm -rf "$fresh"' EXIT
rm -rf "$fresh"
python -m venv "$fresh"
pip=(pip --quiet --disable-pip-version-check)
# By the environment's Python, for which all of it is compiled already.
MATURIN_PEP517_ARGS="--profile dev ${build[*]}" python -m "${pip[@]}" wheel --no-deps --wheel-dir "$fresh" .
"$fresh/bin/python" -m "${pip[@]}" install "$fresh"/counterpoint-*.whl
cd "$fresh"
found=$(bin/python -I -c 'import counterpoint as cp; print(cp.__file__, cp.Mask.causal(9).area)')
case $found in "$fresh"/*" 45") ;; *) echo "what pip installed says $found"; exit 1 ;; esac
bin/counterpoint plan --mask causal:64 --cp-size 2 --json >/dev/null
