"""A dense tie's exchange in two parts, its first chunk and the rest, for the dry run. Pure.

A message has one time of arrival, and a stream has many. Of its chunks the first and the last say
when all is done: the owner can begin with the first, and cannot end before the last. So each node of
a tie is played as two, and each of them has a time of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from piper_owner.cost import rows_per_chunk
from piper_owner.dag.nodes import Action, Sync, SyncKind
from piper_owner.ownership import OwnershipPlan, TiePlan
from piper_owner.planning.config import PlanConfig, Transfer

__all__ = ["StreamTimes", "first_part", "in_two_parts", "stream_times"]

_FIRST: Final = " (first chunk)"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTimes:
    """Seconds of a part of a tie's exchange: the way of its gradient, its step, the way of its weights."""

    grad: float
    step: float
    weight: float


def first_part(name: str) -> str:
    """The bucket that stands for the first chunk of the tie `name`; its own stands for the rest."""
    return name + _FIRST


def stream_times(tie: TiePlan, step: float, config: PlanConfig) -> tuple[StreamTimes, StreamTimes]:
    """Those of the first chunk and of the rest of a dense tie, whose owner steps it in `step` seconds.

    The owner's link carries the gradients, and the weights, of all replicas. Streaming, it steps a chunk
    while the next one comes in and the one before leaves. A gradient that is early is under way since it
    was complete; else it comes in while the owner steps. Weights that the link takes longer for than
    the step are still leaving when that ends.
    """
    wire = math.prod(tie.shape) * config.itemsize / config.bandwidth * len(tie.copies)
    wait = config.latency
    early = config.transfer is Transfer.EARLY
    if not config.streams:
        grad = wait + (wire if early else 0.0)
        whole = StreamTimes(grad=grad, step=step + (0.0 if early else wire), weight=wait + wire)
        return whole, StreamTimes(grad=grad, step=0.0, weight=wait + wire)
    chunks = math.ceil(tie.shape[0] / rows_per_chunk(tie.shape, config.itemsize, config.chunk_bytes))
    first, rest = step / chunks, step - step / chunks
    if early:
        # The rest can end no earlier than one chunk's step behind the last chunk.
        last = max(wire / chunks, wire + first - rest)
        return (
            StreamTimes(grad=wait + wire / chunks, step=first, weight=wait + wire),
            StreamTimes(grad=wait + last, step=rest, weight=wait + wire / chunks),
        )
    slowest = max(wire, step)
    return (
        StreamTimes(grad=wait, step=(wire + step) / chunks, weight=wait + wire),
        StreamTimes(grad=wait, step=slowest - slowest / chunks, weight=wait + wire / chunks),
    )


def in_two_parts(program: Sequence[Action], plan: OwnershipPlan) -> tuple[Action, ...]:
    """`program` with each node of a tie that has copies as two: first chunk and rest.

    The owner steps the first chunk and sends it before it takes the rest. Messages of a pair stay in
    one order on both sides, tie by tie and part by part, so that nothing waits in a circle.
    """
    ties = {tie.name: tie for tie in plan.ties if tie.copies}
    if not any(isinstance(action, Sync) for action in program):
        return tuple(program)
    return tuple(part for action in program for part in _parts(action, ties))


def _parts(action: Action, ties: Mapping[str, TiePlan]) -> Iterator[Action]:
    if not isinstance(action, Sync) or action.bucket not in ties:
        yield action
        return
    tie = ties[action.bucket]
    first = dataclasses.replace(action, bucket=first_part(action.bucket))
    match action.kind:
        case SyncKind.SEND_GRAD | SyncKind.RECV_WEIGHT:
            yield first
            yield action
        case SyncKind.RECV_GRAD:
            yield first
        case SyncKind.OWNER_STEP:
            yield first
            for rank in tie.copies:
                yield Sync(kind=SyncKind.SEND_WEIGHT, bucket=first.bucket, peer=rank)
            for rank in tie.replicas:
                yield Sync(kind=SyncKind.RECV_GRAD, bucket=action.bucket, peer=rank)
            yield action
        case _:
            yield action
