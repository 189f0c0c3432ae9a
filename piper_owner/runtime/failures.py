"""Wait for one call on every rank, and when it fails, find the rank that failed first."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import ray
from ray.exceptions import (
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from piper_owner.errors import ExchangeError, PeerLostError, PeerTimeoutError, PiperOwnerError, RunError
from piper_owner.transport.base import Board

__all__ = ["Call", "RankFailure", "Whereabouts", "gather"]

_GRACE: Final = timedelta(seconds=3)
_NOTICE: Final = timedelta(seconds=1)
_POLL: Final = timedelta(milliseconds=20)
_DEATHS: Final = (RayActorError, NodeDiedError, OutOfMemoryError, WorkerCrashedError)
# Ray has one class for a killed process, a lost node and a constructor that raises; only its words differ.
_NOT_MADE: Final = "error raised in its creation task"
_NODE_LOST: Final = ("node has died", "node was terminated", "node failed")
_NO_MEMORY: Final = "running low on memory"


class RankFailure(RunError):
    """A rank of a run failed. `step` is the one it was in (from 1), `ranks` those at fault, where known.

    `can_restart`: whether the same could go well another time; a wrong input is wrong again.
    """

    def __init__(self, message: str, *, step: int, ranks: Sequence[int], can_restart: bool) -> None:
        super().__init__(message)
        self.step, self.ranks, self.can_restart = step, tuple(ranks), can_restart


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """Where a rank runs: the process id, and the address by which Ray knows its machine."""

    pid: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call made on several ranks: its name in errors ("step 3 of the owner run"), the step that it
    belongs to (from 1), and Ray's reference to each rank's result."""

    what: str
    step: int
    references: Mapping[int, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """How one rank's call ended badly."""

    call: Call
    rank: int
    error: RayError

    @property
    def cause(self) -> BaseException:
        """The rank's own error, where it has one."""
        cause = self.error.cause if isinstance(self.error, RayTaskError) else None
        return cause if isinstance(cause, BaseException) else self.error

    @property
    def is_death(self) -> bool:
        """Whether the rank's process is gone."""
        return isinstance(self.error, _DEATHS)

    @property
    def is_echo(self) -> bool:
        """Whether the rank only saw that another one failed."""
        return isinstance(self.cause, PeerLostError | PeerTimeoutError)

    @property
    def can_restart(self) -> bool:
        """Whether it may go well another time: errors of our own but those of messages say it will not."""
        if self.is_death:
            return _NOT_MADE not in str(self.error)
        return not isinstance(self.cause, PiperOwnerError) or isinstance(self.cause, ExchangeError)


def gather(
    call: Call,
    later: Sequence[Call] = (),
    *,
    timeout: timedelta,
    board: Board,
    where: Mapping[int, Whereabouts],
) -> dict[int, Any]:
    """The results of one call on every rank, by rank.

    `later` are calls already made after this one: a rank that failed in one of those may be what
    this call waits for, so that they are watched as well.

    Raises RankFailure as soon as the root cause of a failure is known: a process that died comes
    before what the first failing rank wrote on `board`, that before any rank's own error, and an
    error of a rank that only lost its peer comes last. Also when `timeout` passes.
    """
    rank_of = {reference: rank for rank, reference in call.references.items()}
    watched = {each: (one, rank) for one in (call, *later) for rank, each in one.references.items()}
    results: dict[int, Any] = {}
    faults: list[_Fault] = []
    deadline = time.monotonic() + timeout.total_seconds()
    while rank_of:
        left = deadline - time.monotonic()
        ready, _ = ray.wait(list(watched), num_returns=1, timeout=max(0.0, left))
        if not ready:
            break
        made, rank = watched.pop(ready[0])
        rank_of.pop(ready[0], None)
        try:
            result = ray.get(ready[0])
        except RayError as error:
            faults.append(_Fault(call=made, rank=rank, error=error))
            if not faults[-1].is_echo:
                break
            # The rank that caused this has not answered yet; it, or its death, is near.
            deadline = min(deadline, time.monotonic() + _GRACE.total_seconds())
        else:
            if made is call:
                results[rank] = result
    if faults:
        fault = min(faults, key=lambda each: (not each.is_death, each.is_echo))
        raise RankFailure(
            _describe(fault, board, where),
            step=fault.call.step,
            ranks=() if fault.is_echo else (fault.rank,),
            can_restart=fault.can_restart,
        ) from fault.cause
    if rank_of:
        late = sorted(rank_of.values())
        raise RankFailure(
            f"{call.what}: rank {', '.join(map(str, late))} did not answer within "
            f"{timeout.total_seconds():g} s; a larger --timeout gives slow ranks more time",
            step=call.step,
            ranks=late,
            can_restart=True,
        )
    return results


def _describe(fault: _Fault, board: Board, where: Mapping[int, Whereabouts]) -> str:
    if fault.is_death:
        return f"{fault.call.what}: {_describe_death(fault, board, where.get(fault.rank))}"
    first = board.first()
    rank = fault.rank if first is None else first.rank
    node = f" (rank {rank} is on node {where[rank].node})" if rank in where else ""
    if first is not None:
        return f"{fault.call.what}: {first}{node}"
    text = str(fault.cause).strip() or "no message"
    return f"{fault.call.what}: rank {rank} failed: {type(fault.cause).__name__}: {text}{node}"


def _describe_death(fault: _Fault, board: Board, where: Whereabouts | None) -> str:
    text = str(fault.error).strip()
    if _NOT_MADE in text:
        return f"the actor of rank {fault.rank} could not be made: {text.splitlines()[-1].strip()}"
    process = "its process" if where is None else f"its process {where.pid}"
    node = "" if where is None else f" on node {where.node}"
    if any(words in text for words in _NODE_LOST):
        what = f"{process}{node} is gone with the node"
    elif _NO_MEMORY in text or isinstance(fault.error, OutOfMemoryError):
        what = f"{process} was killed by Ray{node}, because the machine ran out of memory"
    else:
        what = (
            f"{process} was killed or crashed{node} (often the machine ran out of memory; see the kernel's "
            "log)"
        )
    return f"rank {fault.rank} died: {what}{_noticed(fault.rank, board)}"


def _noticed(dead: int, board: Board) -> str:
    """Which action of the TrainingDAG the death has interrupted, as far as a rank that lives has told.

    A process that is killed cannot say where it was; its peers fail, and say where they were, soon after.
    """
    deadline = time.monotonic() + _NOTICE.total_seconds()
    first = board.first()
    while first is None and time.monotonic() < deadline:
        time.sleep(_POLL.total_seconds())
        first = board.first()
    if first is None:
        return ""
    if first.rank == dead:
        return f"; before, {first}"
    return f"; rank {first.rank} noticed it at {first.where.partition(' of step ')[0]}"
