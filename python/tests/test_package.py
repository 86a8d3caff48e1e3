"""The package as it is installed: quick to import, without PyTorch, and with its errors as they are promised."""

from __future__ import annotations

import subprocess
import sys

import pytest

import counterpoint as cp

BLOCKED = """
import sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refusing())
import counterpoint as cp
"""


def python(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def test_importing_takes_a_tenth_of_a_second_and_no_pytorch() -> None:
    program = (
        "import time; began = time.process_time(); import counterpoint; took = time.process_time() - began\n"
        "import sys; assert not {'torch', 'numpy'} & set(sys.modules); print(took)"
    )
    # Of processor time, and the best of some: the machine may be busy.
    assert min(float(python(program)) for _ in range(5)) < 0.1


def test_masks_and_plans_need_no_pytorch() -> None:
    assert python(BLOCKED + "print(cp.Mask.causal(4).area, cp.Mask.varlen([0, 2, 4]).slices[0][2])") == "10 full"


@pytest.mark.parametrize("name", ["attention", "flex_attention", "Group"])
def test_what_needs_pytorch_says_so(name: str) -> None:
    program = (
        BLOCKED
        + f"""
try:
    cp.{name}
except cp.MissingLibraryError as error:
    assert isinstance(error, ImportError)
    print(error)
"""
    )
    assert python(program) == f"counterpoint.{name} needs PyTorch, which is not installed: pip install torch"


def test_every_name_is_there() -> None:
    assert all(hasattr(cp, name) for name in cp.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'atention'"):
        cp.atention  # noqa: B018


def test_exceptions_are_those_that_callers_expect() -> None:
    expected = {
        cp.MaskError: ValueError,
        cp.PlanError: ValueError,
        cp.TensorError: ValueError,
        cp.PolicyError: ValueError,
        cp.StalledError: TimeoutError,
        cp.MissingLibraryError: ImportError,
    }
    every = {kind for kind in vars(cp).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert {kind.__name__ for kind in every} >= {"OutOfMemoryError", "MismatchError", "DeviceError", "PeerError", "InternalError"}
    for kind in every:
        assert issubclass(kind, cp.Error) and issubclass(kind, RuntimeError)
        assert issubclass(kind, expected.get(kind, Exception))


def test_running_out_of_memory_is_also_pytorchs() -> None:
    torch = pytest.importorskip("torch")
    from counterpoint import errors

    error = errors.of("OutOfMemoryError", "too little", needed=5, available=3)
    assert isinstance(error, cp.OutOfMemoryError) and isinstance(error, torch.OutOfMemoryError)
    assert (error.needed, error.available) == (5, 3)


def test_a_panic_is_an_exception() -> None:
    from counterpoint import _native

    with pytest.raises(cp.InternalError, match="this is a bug in counterpoint, please report it: of a kind"):
        _native._panic("of a kind")
