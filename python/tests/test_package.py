"""The package as it is installed: quick to import, without PyTorch, and with its errors as they are promised."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

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


def test_modules_need_no_import_of_their_own() -> None:
    pytest.importorskip("torch")
    names = ("compat", "megatron", "nn", "parallel", "transformers")
    script = f"import counterpoint as cp; print([getattr(cp, name).__name__ for name in {names}], 'nn' in dir(cp))"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100).stdout
    assert said.split("] ") == [str([f"counterpoint.{name}" for name in names])[:-1], "True\n"]


def test_importing_takes_a_tenth_of_a_second_and_no_pytorch() -> None:
    program = (
        "import time; began = time.process_time(); import counterpoint; counterpoint.Mask.causal(8)\n"
        "took = time.process_time() - began\n"
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


# Of the package that is imported here.
COMMAND = pathlib.Path(sys.executable).with_name("counterpoint")


def command(*arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=240, **how)


def test_the_command_is_that_of_the_module(tmp_path) -> None:
    assert command("--version").stdout == f"counterpoint {cp.__version__}\n"
    page = tmp_path / "a page.html"
    planned = command("plan", "--mask", "causal:64", "--cp-size", "2", "--json", "--report", str(page))
    assert planned.returncode == 0 and json.loads(planned.stdout)["area"] == 2080, planned
    # What made it, as a shell takes it.
    assert f"counterpoint plan --mask causal:64 --cp-size 2 --json --report &#39;{page}&#39;" in page.read_text()
    unknown = command("plan", "--mask", "nonsense", "--cp-size", "2")
    assert unknown.returncode == 2 and unknown.stdout == "" and "nonsense" in unknown.stderr and "Traceback" not in unknown.stderr
    assert command("no-such-command").returncode == 2


def until_it_heeds_signals(process: subprocess.Popen[str]) -> None:
    """The command catches SIGTERM, and what runs before it, Python, does not."""
    caught = 0
    while not caught & 1 << (signal.SIGTERM - 1):
        assert process.poll() is None
        time.sleep(0.02)
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))


def test_the_command_survives_a_closed_pipe_and_heeds_signals() -> None:
    with subprocess.Popen([COMMAND, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(timeout=240) == 0 and process.stderr.read() == ""
    long = ["attention", "--mask", "causal:8k", "--cp-size", "2", "--heads-q", "16", "--backward"]
    for number in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen([COMMAND, *long], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            until_it_heeds_signals(process)
            process.send_signal(number)
            _, said = process.communicate(timeout=240)
            assert process.returncode == 130 and "Traceback" not in said, said


def test_the_command_starts_itself_again() -> None:
    """Processes that it starts of itself are the same command, and end with it."""
    psutil = pytest.importorskip("psutil")
    with subprocess.Popen(
        [COMMAND, "selftest", "--hostile"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        this, started = psutil.Process(process.pid), {}
        for line in process.stderr:
            started |= {child.pid: child.cmdline() for child in this.children() if child.is_running()}
            assert "selftest" in line and "0 failed" in line, line
            if "0 checks" not in line:
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=240) == 130
    assert started and all(str(COMMAND) in words for words in started.values()), started
    until = time.monotonic() + 60
    while any(psutil.pid_exists(child) for child in started):
        assert time.monotonic() < until, started
        time.sleep(0.02)


def test_every_name_is_there() -> None:
    pytest.importorskip("torch")
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
