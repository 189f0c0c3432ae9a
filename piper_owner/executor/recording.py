"""Records what one rank does in some steps: its actions and their times, and what torch's profiler sees."""

from __future__ import annotations

import contextlib
import gzip
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

import torch

from piper_owner.dag.nodes import Action, format_action
from piper_owner.tracing.events import RankTrace, Trace, TraceEvent
from piper_owner.transport.base import Fabric

__all__ = [
    "ClockOffset",
    "RankRecord",
    "Recorder",
    "Recording",
    "StepObserver",
    "align_clocks",
    "trace_of_run",
]

_ROUNDS: Final = 8


class StepObserver(Protocol):
    """What a RankExecutor with an `observer` runs each action in."""

    def around(self, action: Action, step: int) -> AbstractContextManager[None]:
        """Enter before `action` of `step` (from 0) runs, leave when it has."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What is recorded of a run: its steps from `first_step` (from 0) on, and whether torch profiles them."""

    first_step: int
    profile: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank has recorded; `profile` is torch's own trace, JSON under gzip."""

    trace: RankTrace
    profile: bytes | None = field(default=None, repr=False)


class Recorder:
    """The StepObserver that keeps a TraceEvent for every action.

    `moved` gives the bytes that the rank has sent and received so far.
    """

    def __init__(self, moved: Callable[[], tuple[int, int]], *, profile: bool) -> None:
        self._moved = moved
        self._events: list[TraceEvent] = []
        self._profiler = torch.profiler.profile() if profile else None
        self._is_profiling = False

    def start(self) -> None:
        """Begin to profile, if that was asked for. Twice is fine."""
        if self._profiler is not None and not self._is_profiling:
            self._profiler.start()
            self._is_profiling = True

    @contextmanager
    def around(self, action: Action, step: int) -> Iterator[None]:
        """Keep when `action` began and ended; one that fails is not kept."""
        name = None if self._profiler is None else torch.profiler.record_function(format_action(action))
        sent, received = self._moved()
        start = time.perf_counter_ns()
        with name or contextlib.nullcontext():
            yield
        end = time.perf_counter_ns()
        now_sent, now_received = self._moved()
        self._events.append(
            TraceEvent(
                action=action,
                step=step,
                start_ns=start,
                end_ns=end,
                sent_bytes=now_sent - sent,
                received_bytes=now_received - received,
            )
        )

    def stop(self) -> None:
        """End the profile, if there is one. No message of this rank may be under way. Twice is fine."""
        if self._profiler is not None and self._is_profiling:
            self._profiler.stop()
            self._is_profiling = False

    def finish(self, *, rank: int, pipeline: int, clock: ClockOffset, follows: bool) -> RankRecord:
        """What was recorded, in the time of the first rank; after `stop`."""
        profile = None if self._profiler is None else _exported(self._profiler)
        events = tuple(
            replace(event, start_ns=event.start_ns + clock.offset_ns, end_ns=event.end_ns + clock.offset_ns)
            for event in self._events
        )
        trace = RankTrace(
            rank=rank, pipeline=pipeline, events=events, clock_error_ns=clock.error_ns, follows=follows
        )
        return RankRecord(trace=trace, profile=profile)


def _exported(profiler: torch.profiler.profile) -> bytes:
    with tempfile.TemporaryDirectory(prefix="piper-owner-") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return gzip.compress(file.read_bytes(), compresslevel=6, mtime=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """What to add to this rank's clock to have the first rank's; `error_ns` bounds how wrong that is."""

    offset_ns: int
    error_ns: int

    @classmethod
    def within(cls, low: int, high: int) -> ClockOffset:
        """From bounds of the offset. Clocks that may be one, as those of one host are, count as one."""
        if low <= 0 <= high:
            return cls(offset_ns=0, error_ns=max(-low, high))
        return cls(offset_ns=(low + high) // 2, error_ns=(high - low + 1) // 2)


def align_clocks(fabric: Fabric) -> ClockOffset:
    """This rank's `time.perf_counter_ns` against that of rank 0. Collective over `fabric`.

    No rank leaves an all-reduce before every rank has entered it. So, in rank 0's time, this rank's
    exit is after rank 0's entry, and its entry before rank 0's exit: two bounds of the offset, the best
    of several rounds each. Clocks that drift between these rounds and the events are not corrected.
    """
    if fabric.world_size == 1:
        return ClockOffset(offset_ns=0, error_ns=0)
    group = fabric.group(tuple(range(fabric.world_size)), "clocks")
    try:
        times = torch.zeros(fabric.world_size, _ROUNDS, 2, dtype=torch.int64, device="cpu")
        for round_ in range(_ROUNDS):
            token = torch.zeros(1, dtype=torch.int64, device="cpu")
            times[fabric.rank, round_, 0] = time.perf_counter_ns()
            group.all_reduce(token)
            times[fabric.rank, round_, 1] = time.perf_counter_ns()
        group.all_reduce(times)
    finally:
        group.close()
    first, mine = times[0], times[fabric.rank]
    low = int((first[:, 0] - mine[:, 1]).max())
    high = int((first[:, 1] - mine[:, 0]).min())
    # Rank 0 against itself has no offset, whatever the bounds say.
    return ClockOffset(offset_ns=0, error_ns=0) if fabric.rank == 0 else ClockOffset.within(low, high)


def trace_of_run(records: tuple[RankRecord, ...], *, title: str) -> Trace:
    """The trace of a run from what its ranks recorded."""
    return Trace(title=title, ranks=tuple(record.trace for record in records), is_measured=True)
