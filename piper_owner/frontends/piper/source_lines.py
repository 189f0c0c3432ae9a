"""The line of the user's source that an operation of a graph comes from."""

from __future__ import annotations

import re
import traceback
from typing import Final

from torch import fx

from piper_owner.frontends.piper.annotation import innermost_line

__all__ = ["line_of"]

_FRAME: Final = re.compile(r'File "(.+)", line (\d+), in (\S+)\n\s+(.*)')


def line_of(node: fx.Node) -> str:
    """`file:line: code` of the innermost line of the user's own that `node` comes from."""
    text = node.meta.get("stack_trace") or ""
    return innermost_line(
        [
            traceback.FrameSummary(file, int(number), function, lookup_line=False, line=line)
            for file, number, function, line in _FRAME.findall(text)
        ]
    )
