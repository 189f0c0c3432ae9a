"""Marks regions of model code: the context manager that users write, and the record of a trace.

In eager running a region costs one call and leaves nothing behind. While Dynamo traces, torch's own
`torch.fx.traceback.annotate` puts the region's number on every node that is traced inside it.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch._guards import TracingContext
from torch.fx import traceback as fx_traceback

__all__ = ["Entry", "Recorder", "annotate", "innermost_line", "recording"]

_NO_REGION: Final = contextlib.nullcontext()
_TORCH: Final = str(Path(torch.__file__).parent)
_HERE: Final = str(Path(__file__).parent)
_RUN_ONLY: Final = frozenset({"PASS"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry into a region: its tag, its mark on the nodes, its line, and the regions around it."""

    tag: str
    mark: int
    line: str
    around: frozenset[str]


@dataclass(slots=True)
class Recorder:
    """The entries of the trace that is running. Dynamo may start a trace anew; only the last one counts."""

    entries: list[Entry] = field(default_factory=list)
    context: TracingContext | None = None

    def enter(self, tag: str) -> int:
        """Note an entry, in whose trace it is one, and return the mark for its nodes."""
        context = TracingContext.try_get()
        if context is not self.context:
            self.context = context
            self.entries.clear()
        around = fx_traceback.current_meta.get("custom") or {}
        line = innermost_line(TracingContext.extract_stack())
        self.entries.append(
            Entry(tag=tag, mark=len(self.entries), line=line, around=frozenset(map(str, around)))
        )
        return len(self.entries) - 1

    def regions(self, tag: str) -> tuple[Entry, ...]:
        """The entries of `tag`, in trace order: the i-th is region i."""
        return tuple(entry for entry in self.entries if entry.tag == tag)


_active: list[Recorder] = []  # at most one: `capture` traces one model at a time


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Give the regions of the trace inside numbers. For one trace of the process at a time."""
    recorder = Recorder()
    _active.append(recorder)
    # A trace that fails inside a region may leave its mark behind.
    before, fx_traceback.current_meta = fx_traceback.current_meta, {}
    try:
        yield recorder
    finally:
        fx_traceback.current_meta = before
        _active.remove(recorder)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _enter(tag: str) -> int:
    """The mark of the region that begins here; Dynamo calls this while it traces, once for an entry."""
    return _active[-1].enter(tag) if _active else 0


def annotate(tag: str) -> AbstractContextManager[None]:
    """A region of model code: `with piper_owner.annotate("PP"): ...`. Local.

    In trace order the entries of a tag are its regions 0, 1, 2 and so on; a loop over layers with the
    region inside makes one for each layer. `"PP"` regions become pipeline stages; a region of another
    tag may stand around one or inside. A directive's filter, such as {"PP": 0}, names them.
    In eager running, and under a torch.compile of your own, it does nothing.

    Raises ValueError for a tag that is empty, no string, or `PASS`, which filters keep for themselves.
    """
    if not isinstance(tag, str) or not tag or tag in _RUN_ONLY:
        raise ValueError(f"annotate({tag!r}): a tag is a name such as 'PP'; 'PASS' is taken by filters")
    if not torch.compiler.is_dynamo_compiling():
        return _NO_REGION
    return fx_traceback.annotate({tag: _enter(tag)})


def innermost_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """`file:line: code` of the innermost frame of `stack` that is the user's own."""
    for frame in reversed(stack):
        if not frame.filename.startswith((_TORCH, _HERE)):
            code = (frame.line or "").strip()
            return (
                f"{frame.filename}:{frame.lineno}: `{code}`" if code else f"{frame.filename}:{frame.lineno}"
            )
    return "in a line that torch does not tell"
