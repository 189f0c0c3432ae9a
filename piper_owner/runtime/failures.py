"""Wait for one call on every rank, and when it fails, find the rank that failed first."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, RayTaskError

from piper_owner.errors import PeerLostError, PeerTimeoutError, RunError
from piper_owner.transport.base import Board

__all__ = ["Call", "gather"]

_GRACE: Final = timedelta(seconds=3)
# Ray has one class for a killed process and for a constructor that raises; only its words differ.
_NOT_MADE: Final = "error raised in its creation task"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call made on several ranks: its name in errors ("step 3 of the owner run"), and Ray's
    reference to each rank's result."""

    what: str
    references: Mapping[int, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """How one rank's call ended badly."""

    what: str
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
        return isinstance(self.error, RayActorError | ActorDiedError | ActorUnavailableError)

    @property
    def is_echo(self) -> bool:
        """Whether the rank only saw that another one failed."""
        return isinstance(self.cause, PeerLostError | PeerTimeoutError)


def gather(
    call: Call,
    later: Sequence[Call] = (),
    *,
    timeout: timedelta,
    board: Board,
    pids: Mapping[int, int],
) -> dict[int, Any]:
    """The results of one call on every rank, by rank.

    `later` are calls already made after this one: a rank that failed in one of those may be what
    this call waits for, so that they are watched as well.

    Raises RunError as soon as the root cause of a failure is known: a process that died comes
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
            faults.append(_Fault(what=made.what, rank=rank, error=error))
            if not faults[-1].is_echo:
                break
            # The rank that caused this has not answered yet; it, or its death, is near.
            deadline = min(deadline, time.monotonic() + _GRACE.total_seconds())
        else:
            if made is call:
                results[rank] = result
    if faults:
        fault = min(faults, key=lambda each: (not each.is_death, each.is_echo))
        raise RunError(_describe(fault, board, pids)) from fault.cause
    if rank_of:
        late = ", ".join(str(rank) for rank in sorted(rank_of.values()))
        raise RunError(
            f"{call.what}: rank {late} did not answer within {timeout.total_seconds():g} s; a larger "
            "--timeout gives slow ranks more time"
        )
    return results


def _describe(fault: _Fault, board: Board, pids: Mapping[int, int]) -> str:
    what = fault.what
    if fault.is_death:
        text = str(fault.error).strip()
        if _NOT_MADE in text:
            return (
                f"{what}: the actor of rank {fault.rank} could not be made: {text.splitlines()[-1].strip()}"
            )
        pid = pids.get(fault.rank)
        process = f"its process {pid}" if pid is not None else "its process"
        return (
            f"{what}: rank {fault.rank} died: {process} was killed or crashed (often the machine ran out of "
            "memory; see the kernel's log)"
        )
    first = board.first()
    if first is not None:
        return f"{what}: {first}"
    text = str(fault.cause).strip() or "no message"
    return f"{what}: rank {fault.rank} failed: {type(fault.cause).__name__}: {text}"
