"""What a transport is: ordered lines between two ranks, and groups that add.

The exchange is written against these classes alone. Every implementation (gloo, in-memory)
passes the same contract tests, `tests/test_transport.py`:

- messages of one channel and one direction arrive in the order they were posted;
- `post_send` and `post_recv` never block, `Work.wait` blocks for at most the timeout, and waiting
  twice is the same as once;
- when one end closes, every wait of the other end that needs it fails at once;
- a wait that fails closes its end, so that the other end need not run out of time too;
- a wait that fails says which two ranks, and what the first failing rank reported, if any did.
"""

from __future__ import annotations

import abc
import json
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Protocol

import torch

from piper_owner.errors import PeerLostError, PeerTimeoutError

__all__ = [
    "Board",
    "Boards",
    "Channel",
    "Fabric",
    "Failure",
    "Group",
    "Work",
    "cause",
    "lost",
    "others",
    "timed_out",
]


class Work(Protocol):
    """A posted send or receive."""

    def wait(self) -> None:
        """Block until done. Raises PeerTimeoutError or PeerLostError; a second call does nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Who failed first, where, and why."""

    rank: int
    where: str
    error: str

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """The failure written by `to_json`."""
        fields = json.loads(text)
        return cls(rank=int(fields["rank"]), where=str(fields["where"]), error=str(fields["error"]))

    def __str__(self) -> str:
        return f"rank {self.rank} failed first, at {self.where}: {self.error}"


class Board(abc.ABC):
    """A place all ranks can read where the first failing rank writes who, where and why."""

    @abc.abstractmethod
    def report(self, failure: Failure) -> None:
        """Write `failure` unless somebody wrote before. Never raises for a lost store."""

    @abc.abstractmethod
    def first(self) -> Failure | None:
        """The first failure, or None if there is none or the board is out of reach. Does not block."""


class Boards(Board):
    """Several boards as one: a report goes to each, and the first failure on any of them counts."""

    def __init__(self, *boards: Board) -> None:
        self._boards = boards

    def report(self, failure: Failure) -> None:
        """Write `failure` on every board that has none yet."""
        for board in self._boards:
            board.report(failure)

    def first(self) -> Failure | None:
        """The failure of the first board that has one."""
        found = (board.first() for board in self._boards)
        return next((failure for failure in found if failure is not None), None)


def others(ranks: tuple[int, ...], rank: int) -> str:
    """The members of a group for which `rank` waits, in words."""
    found = [str(other) for other in ranks if other != rank]
    return f"rank{'s' * (len(found) > 1)} {', '.join(found)}"


def timed_out(board: Board, rank: int, peer: str, timeout: timedelta) -> PeerTimeoutError:
    """The error of a wait of `rank` for `peer` that ran out of time."""
    return PeerTimeoutError(
        f"rank {rank} waited {timeout.total_seconds():g} s for {peer}, which did not answer{cause(board)}"
    )


def lost(board: Board, rank: int, peer: str, reason: str) -> PeerLostError:
    """The error of a wait of `rank` for `peer` whose connection broke."""
    return PeerLostError(f"rank {rank} lost {peer} ({reason}){cause(board)}")


def cause(board: Board) -> str:
    """What an error message adds about the rank that failed first."""
    failure = board.first()
    return "; no rank has reported an error" if failure is None else f"; {failure}"


class Channel(abc.ABC):
    """One end of a private, ordered, two-way line between `rank` and `peer`.

    It has a communicator of its own: traffic elsewhere neither delays nor reorders it. Tensors are
    contiguous CPU tensors, and sizes are not checked here (see `wire`): a receive must be posted
    with exactly the dtype and number of elements that the peer sends.
    """

    rank: int
    peer: int
    timeout: timedelta

    @abc.abstractmethod
    def post_send(self, tensor: torch.Tensor) -> Work:
        """Start sending `tensor`, which must not be written before the work is waited on."""

    @abc.abstractmethod
    def post_recv(self, tensor: torch.Tensor) -> Work:
        """Start receiving into `tensor`, which must not be read before the work is waited on."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give the line up; the peer's pending waits fail at once. Closing twice is fine."""


class Group(abc.ABC):
    """A collective over several ranks; every member makes the same calls in the same order."""

    ranks: tuple[int, ...]

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace the contiguous CPU tensor by its sum over the group, the same bits on each rank."""

    @abc.abstractmethod
    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        """Replace the contiguous CPU tensor of rank `root` by the sum; the others' hold anything then."""

    @abc.abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Replace the contiguous CPU tensor of every rank by that of rank `root`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give the group up. Closing twice is fine."""


class Fabric(abc.ABC):
    """How one rank reaches the others.

    `channel` and `group` are collective over the ranks they name: each of them calls it, with the
    same `purpose`, in the same order as its other openings. Each opening is a new line, also when
    `purpose` was used before.
    """

    rank: int
    world_size: int
    timeout: timedelta
    board: Board

    @property
    def job_rank(self) -> int:
        """This rank among all of the job, by which the board knows it: another one in a view of few ranks."""
        return self.rank

    @abc.abstractmethod
    def channel(self, peer: int, purpose: str) -> Channel:
        """This rank's end of a new line to `peer`. Raises PeerTimeoutError if the peer never comes."""

    @abc.abstractmethod
    def group(self, ranks: tuple[int, ...], purpose: str) -> Group:
        """A new group over `ranks`, which include this one. Raises PeerTimeoutError as above."""
