"""Reports: one page of HTML that needs no network, in a file or a notebook."""

from __future__ import annotations

import errno
import html
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field

from counterpoint._native import Timeline


@dataclass(frozen=True)
class Report:
    """A page. A notebook shows it in a frame of its own, because its styles and scripts are those of a whole page."""

    html: str
    title: str
    # Of the forward: measured, where it was.
    timeline: Callable[[], Timeline] = field(repr=False, compare=False)

    def chrome_trace(self) -> str:
        """The timeline of the forward as JSON for Perfetto and chrome://tracing: as it was measured inside
        `counterpoint.profile()`, or else as it is predicted."""
        return self.timeline().chrome_trace()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page to `path`, whole or not at all; into pipes and devices as it goes."""
        # A link stays, and what it leads to is written.
        target = os.path.realpath(os.fspath(path))
        folder = os.path.dirname(target)
        if os.path.isdir(target):
            raise IsADirectoryError(errno.EISDIR, "it is a folder; give a file in it", target)
        if not os.path.isdir(folder):
            raise FileNotFoundError(errno.ENOENT, "there is no such folder to write to", folder)
        if os.path.exists(target) and not os.path.isfile(target):
            with open(target, "w", encoding="utf-8") as pipe:
                pipe.write(self.html)
            return
        handle, name = tempfile.mkstemp(dir=folder, prefix=".counterpoint-", suffix=".html")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(self.html)
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise

    def _repr_html_(self) -> str:
        page, title = html.escape(self.html, quote=True), html.escape(self.title)
        look = f'sandbox="allow-scripts" title="{title}" style="width:100%;height:720px;border:0"'
        return f'<iframe srcdoc="{page}" {look}></iframe>'

    def __repr__(self) -> str:
        return f"Report({self.title!r}, {len(self.html):,} characters)"


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current
