"""What the scripts' command lines have in common."""

import argparse
import importlib.util
import sys


def note(text):
    print(text, file=sys.stderr, flush=True)


def first_line(error):
    """What fits a line of an error."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def names(allowed):
    """Parses names of a list, joined by commas."""

    def parse(text):
        chosen = text.split(",")
        unknown = [name for name in chosen if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; choose from {', '.join(allowed)}")
        return chosen

    return parse


def size(text):
    """A number, which may count 1024s (k) or their squares (M)."""
    unit = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower())
    return int(text[:-1]) * unit if unit else int(text)


def sizes(text):
    return [size(part) for part in text.split(",")]


def heads(text):
    """Query and key heads, such as 64:8."""
    pair = tuple(int(n) for n in text.split(":"))
    if len(pair) != 2 or min(pair) < 1 or pair[0] % pair[1]:
        raise argparse.ArgumentTypeError(f"{text}; give query and key heads, such as 64:8")
    return pair


def shapes(text):
    """Three numbers each, such as 8192:8192:7168, joined by commas."""
    chosen = [[int(n) for n in shape.split(":")] for shape in text.split(",")]
    if any(len(shape) != 3 or min(shape) < 1 for shape in chosen):
        raise argparse.ArgumentTypeError(f"{text}; a shape is three numbers, such as 8192:8192:7168")
    return chosen


def described(text):
    """A parser whose help begins with `text`, as it is."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_folder(folder):
    """Packages are imported from there first. Its `prepare.py` does what they need before they are."""
    sys.path.insert(1, str(folder.resolve()))
    prepare = folder / "prepare.py"
    if prepare.is_file():
        spec = importlib.util.spec_from_file_location("prepare", prepare)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
