"""The hand-written types of the compiled module, against the module itself."""

from __future__ import annotations

import ast
import inspect
import pathlib

import counterpoint
from counterpoint import _native

STUBS = pathlib.Path(counterpoint.__file__).with_name("_native.pyi")
# What every object has.
USUAL = set(dir(object)) | {"__module__", "__doc__", "__weakref__"}


def stubs() -> dict[str, dict[str, ast.FunctionDef] | ast.FunctionDef | None]:
    found: dict[str, dict[str, ast.FunctionDef] | ast.FunctionDef | None] = {}
    for node in ast.parse(STUBS.read_text()).body:
        if isinstance(node, ast.ClassDef):
            members = [member for member in node.body if isinstance(member, ast.FunctionDef)]
            found[node.name] = {member.name: member for member in members}
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            continue  # a name for a type
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = None
    return found


def arguments(node: ast.FunctionDef) -> list[str]:
    given = node.args
    names = [argument.arg for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
    return [name for name in names if name not in ("self", "cls")]


def test_every_name_is_in_both() -> None:
    module = {name for name in dir(_native) if not name.startswith("__") or name == "__version__"}
    assert module == set(stubs())


def test_members_and_arguments_agree() -> None:
    for name, stub in stubs().items():
        real = getattr(_native, name)
        if isinstance(stub, ast.FunctionDef):
            assert list(inspect.signature(real).parameters) == arguments(stub), name
        elif isinstance(stub, dict):
            members = {member for member in vars(real) if member not in USUAL}
            typed = {member for member in stub if member not in USUAL}
            assert members == typed, name
            for member in members:
                value = inspect.getattr_static(real, member)
                if isinstance(value, (staticmethod, classmethod)) or inspect.isroutine(value):
                    try:
                        signature = inspect.signature(getattr(real, member))
                    except ValueError:  # a slot, whose arguments Python fixes
                        continue
                    names = [argument for argument in signature.parameters if argument != "self"]
                    if not member.startswith("__"):
                        assert names == arguments(stub[member]), f"{name}.{member}"
