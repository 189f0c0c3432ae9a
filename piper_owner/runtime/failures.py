"""Wait for one call on every rank, and when it fails, find the rank that failed first."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, RayTaskError

from piper_owner.errors import PeerLostError, PeerTimeoutError, RunError
from piper_owner.transport.base import Board

__all__ = ["gather"]

_GRACE: Final = timedelta(seconds=3)
# Ray has one class for a killed process and for a constructor that raises; only its words differ.
_NOT_MADE: Final = "error raised in its creation task"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """How one rank's call ended badly."""

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
    calls: Mapping[int, Any],
    *,
    what: str,
    timeout: timedelta,
    board: Board,
    pids: Mapping[int, int],
) -> dict[int, Any]:
    """The results of one call per rank, by rank.

    `calls` are Ray object references, `what` names the call in errors ("step 3 of the owner run").

    Raises RunError as soon as the root cause of a failure is known: a process that died comes
    before what the first failing rank wrote on `board`, that before any rank's own error, and an
    error of a rank that only lost its peer comes last. Also when `timeout` passes.
    """
    rank_of = {call: rank for rank, call in calls.items()}
    results: dict[int, Any] = {}
    faults: list[_Fault] = []
    deadline = time.monotonic() + timeout.total_seconds()
    while rank_of:
        left = deadline - time.monotonic()
        ready, _ = ray.wait(list(rank_of), num_returns=1, timeout=max(0.0, left))
        if not ready:
            break
        rank = rank_of.pop(ready[0])
        try:
            results[rank] = ray.get(ready[0])
        except RayError as error:
            faults.append(_Fault(rank=rank, error=error))
            if not faults[-1].is_echo:
                break
            # The rank that caused this has not answered yet; it, or its death, is near.
            deadline = min(deadline, time.monotonic() + _GRACE.total_seconds())
    if faults:
        fault = min(faults, key=lambda each: (not each.is_death, each.is_echo))
        raise RunError(_describe(fault, what, board, pids)) from fault.cause
    if rank_of:
        late = ", ".join(str(rank) for rank in sorted(rank_of.values()))
        raise RunError(
            f"{what}: rank {late} did not answer within {timeout.total_seconds():g} s; a larger --timeout "
            "gives slow ranks more time"
        )
    return results


def _describe(fault: _Fault, what: str, board: Board, pids: Mapping[int, int]) -> str:
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
