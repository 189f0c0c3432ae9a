"""What a trace is made of: actions with their times, rank by rank. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from piper_owner.dag.nodes import (
    Across,
    Action,
    BucketStep,
    Collective,
    Compute,
    ComputeKind,
    Sync,
    SyncKind,
    Transfer,
)
from piper_owner.simulate import Timeline

__all__ = ["Family", "RankTrace", "Trace", "TraceEvent", "family_of", "timeline_of", "trace_of"]

_NANOSECONDS = 10**9


class Family(enum.Enum):
    """What an action is, as pictures and traces tell actions apart."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward, input"
    BACKWARD_WEIGHT = "backward, weights"
    STEP = "step"
    SYNC = "sync"
    MESSAGE = "message"


def family_of(action: Action) -> Family:
    """The family of `action`; a message is one of the pipeline's own, all of a tie's is sync."""
    match action:
        case Compute(kind=kind):
            return _family_of_compute(kind)
        case BucketStep() | Sync(kind=SyncKind.OWNER_STEP):
            return Family.STEP
        case Sync() | Collective() | Across():
            return Family.SYNC
        case Transfer():
            return Family.MESSAGE
        case _:
            assert_never(action)


def _family_of_compute(kind: ComputeKind) -> Family:
    match kind:
        case ComputeKind.FORWARD:
            return Family.FORWARD
        case ComputeKind.BACKWARD:
            return Family.BACKWARD
        case ComputeKind.BACKWARD_INPUT:
            return Family.BACKWARD_INPUT
        case ComputeKind.BACKWARD_WEIGHT:
            return Family.BACKWARD_WEIGHT
        case _:
            assert_never(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One action of one step (from 0), from start to end in nanoseconds of the trace's clock.

    Bytes are those that the rank posted, or took in, meanwhile, headers included.
    """

    action: Action
    step: int
    start_ns: int
    end_ns: int
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """What one rank did, in temporal order; `rank` is that in its pipeline.

    `clock_error_ns` bounds how far its times may be off against those of the first rank. A rank that
    `follows` leaves the sync of its ties to the lead pipeline: these actions do nothing there.
    """

    rank: int
    events: tuple[TraceEvent, ...]
    pipeline: int = 0
    clock_error_ns: int = 0
    follows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All ranks. In a measured trace, other than in a predicted one, OWNER_STEP does what RECV_GRAD and
    SEND_WEIGHT stand for: it takes gradients in and sends weights off chunk by chunk."""

    title: str
    ranks: tuple[RankTrace, ...]
    is_measured: bool

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of which there are events, ascending."""
        return tuple(sorted({event.step for rank in self.ranks for event in rank.events}))


def trace_of(timeline: Timeline, *, title: str, num_steps: int = 1) -> Trace:
    """A dry run as a trace; its times are seconds, and each program is that of `num_steps` equal steps."""
    ranks = []
    for rank, program in enumerate(timeline.programs):
        length = max(1, len(program) // num_steps)
        events = tuple(
            TraceEvent(
                action=event.action,
                step=position // length,
                start_ns=round(event.start * _NANOSECONDS),
                end_ns=round(event.end * _NANOSECONDS),
            )
            for position, event in enumerate(timeline.events(rank))
        )
        ranks.append(RankTrace(rank=rank, events=events))
    return Trace(title=title, ranks=tuple(ranks), is_measured=False)


def timeline_of(trace: Trace, step: int, *, pipeline: int = 0) -> Timeline:
    """`step` of one pipeline, in seconds from its first event; a rank is busy while it does not wait."""
    rows: list[Sequence[TraceEvent]] = [
        [event for event in rank.events if event.step == step]
        for rank in sorted(trace.ranks, key=lambda rank: rank.rank)
        if rank.pipeline == pipeline
    ]
    begin = min((event.start_ns for row in rows for event in row), default=0)

    def seconds(time_ns: int) -> float:
        return (time_ns - begin) / _NANOSECONDS

    return Timeline(
        programs=tuple(tuple(event.action for event in row) for row in rows),
        starts=tuple(tuple(seconds(event.start_ns) for event in row) for row in rows),
        ends=tuple(tuple(seconds(event.end_ns) for event in row) for row in rows),
        busy=tuple(
            sum(event.end_ns - event.start_ns for event in row if _works(event.action)) / _NANOSECONDS
            for row in rows
        ),
    )


def _works(action: Action) -> bool:
    return family_of(action) not in (Family.SYNC, Family.MESSAGE)
