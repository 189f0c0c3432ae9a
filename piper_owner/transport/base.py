"""What a transport is: ordered lines between two ranks, and groups that add.

The exchange is written against these classes alone. Every implementation (gloo, in-memory)
passes the same contract tests, `tests/test_transport.py`:

- messages of one channel and one direction arrive in the order they were posted;
- `post_send` and `post_recv` never block, `Work.wait` blocks for at most the timeout, and waiting
  twice is the same as once;
- when one end closes, every wait of the other end that needs it fails at once;
- a wait that fails closes its end, so that the other end need not run out of time too;
- a wait that fails says which ranks, and what the first failing rank reported, or, where no rank has
  failed by itself, who waited for whom, and who has said nothing (see `cause`).
"""

from __future__ import annotations

import abc
import json
import time
from collections import deque
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final, Protocol, TypeVar

import torch

from piper_owner.errors import ConfigError, ExchangeError, PeerLostError, PeerTimeoutError

__all__ = [
    "Board",
    "Boards",
    "Channel",
    "Fabric",
    "Failure",
    "Group",
    "Work",
    "cause",
    "closed_here",
    "lost",
    "others",
    "timed_out",
    "waited",
]

_GRACE: Final = timedelta(seconds=0.5)
"""How long a wait that failed gives the others to say why."""
_POLL: Final = timedelta(seconds=0.05)
_MOST_SHOWN: Final = 4


class Work(Protocol):
    """A posted send or receive."""

    def wait(self) -> None:
        """Block until done. Raises PeerTimeoutError or PeerLostError; a second call does nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Which rank failed, where, and why.

    A rank failed by itself if it waited for nobody; otherwise `awaited` are the ranks that it waited for.
    """

    rank: int
    where: str
    error: str
    awaited: tuple[int, ...] = ()

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """The failure written by `to_json`."""
        fields = json.loads(text)
        return cls(
            rank=int(fields["rank"]),
            where=str(fields["where"]),
            error=str(fields["error"]),
            awaited=tuple(map(int, fields["awaited"])),
        )

    @property
    def members(self) -> frozenset[int]:
        """The rank and those that it waited for."""
        return frozenset((self.rank, *self.awaited))

    def __str__(self) -> str:
        if self.awaited:
            return f"rank {self.rank} waited for {others(self.awaited, self.rank)}"
        return f"rank {self.rank} failed first, at {self.where}: {self.error}"


class Board(abc.ABC):
    """A place all ranks can read where failing ranks write who, where and why."""

    @abc.abstractmethod
    def report(self, failure: Failure) -> None:
        """Write `failure` down. Never raises for a lost store.

        Of the failures of ranks that waited for nobody only the first stays, of the others the first of
        each rank.
        """

    def report_error(self, rank: int, where: str, error: BaseException) -> None:
        """Report that `error` ended `rank` at `where`; a wait that failed was reported where it did."""
        if not (isinstance(error, ExchangeError) and error.awaited):
            first = (str(error).splitlines() or [""])[0]
            self.report(Failure(rank=rank, where=where, error=f"{type(error).__name__}: {first}"))

    @abc.abstractmethod
    def first(self) -> Failure | None:
        """The first failure of a rank that waited for nobody.

        None if there is none or the board is out of reach. Does not block.
        """

    @abc.abstractmethod
    def wait_of(self, rank: int) -> Failure | None:
        """The failed wait of `rank`; None as in `first`."""


class Boards(Board):
    """Several boards as one: a report goes to each, and the first failure on any of them counts.

    Who reads a failure on one of them writes it on the others, whose ranks may wait for the reader.
    Waits are of the first board alone: the others may number their ranks in another way.
    """

    def __init__(self, *boards: Board) -> None:
        self._boards = boards

    def report(self, failure: Failure) -> None:
        """Write `failure` on every board that has none yet."""
        for board in self._boards[:1] if failure.awaited else self._boards:
            board.report(failure)

    def first(self) -> Failure | None:
        """The failure of the first board that has one; then all have one."""
        found = [board.first() for board in self._boards]
        failure = next((failure for failure in found if failure is not None), None)
        if failure is not None:
            for board, has in zip(self._boards, found, strict=True):
                if has is None:
                    board.report(failure)
        return failure

    def wait_of(self, rank: int) -> Failure | None:
        """What the first board has."""
        return self._boards[0].wait_of(rank)


def others(ranks: tuple[int, ...], rank: int) -> str:
    """The members of a group for which `rank` waits, in words."""
    found = [str(other) for other in ranks if other != rank]
    return f"rank{'s' * (len(found) > 1)} {', '.join(found)}"


_WaitError = TypeVar("_WaitError", PeerTimeoutError, PeerLostError)


def timed_out(board: Board, rank: int, ranks: tuple[int, ...], timeout: timedelta) -> PeerTimeoutError:
    """The error of a wait of `rank` for the others of `ranks` that ran out of time. Takes up to 0.5 s."""
    text = f"rank {rank} waited {timeout.total_seconds():g} s for {others(ranks, rank)}, which did not answer"
    return waited(PeerTimeoutError(text), board, rank, ranks)


def lost(board: Board, rank: int, ranks: tuple[int, ...], reason: str) -> PeerLostError:
    """The error of a wait of `rank` for the others of `ranks` whose connection broke. Takes up to 0.5 s."""
    text = f"rank {rank} lost {others(ranks, rank)} ({reason})"
    return waited(PeerLostError(text), board, rank, ranks)


def closed_here(board: Board, rank: int, ranks: tuple[int, ...], what: str) -> PeerLostError:
    """The error of using `what` after `rank` itself closed it, or after a wait of it failed."""
    awaited = tuple(other for other in ranks if other != rank)
    why = cause(board, rank, awaited)
    error = PeerLostError(f"rank {rank} lost {others(ranks, rank)} ({what} is closed){why}")
    error.awaited = awaited
    return error


def waited(error: _WaitError, board: Board, rank: int, ranks: tuple[int, ...]) -> _WaitError:
    """Report that `rank` waited in vain for the others of `ranks`, and let `error` name the cause.

    The others get a moment to say why: one that refuses a message closes the line before it
    reports, and of ranks whose time runs out together each is to see that the others waited, too. A
    rank that lost another which has said why waits no longer, so a chain of ranks ends in one moment.
    """
    error.awaited = awaited = tuple(other for other in ranks if other != rank)
    wait = Failure(rank=rank, where="", error=str(error), awaited=awaited)
    board.report(wait)
    deadline = time.monotonic() + _GRACE.total_seconds()
    while time.monotonic() < deadline and board.first() is None:
        if isinstance(error, PeerLostError) and _follow(board, wait)[0]:
            break
        time.sleep(_POLL.total_seconds())
    error.args = (f"{error}{cause(board, rank, awaited)}",)
    return error


def cause(board: Board, rank: int, awaited: tuple[int, ...]) -> str:
    """What the message of a wait of `rank` for `awaited` that failed adds about the others.

    The rank that failed by itself, if there is one. Otherwise the waits of others, from those that were
    waited for on, and who at their end has reported nothing: it has stopped, or is gone.
    """
    failure = board.first()
    if failure is not None:
        return f"; {failure}"
    waits, silent = _follow(board, Failure(rank=rank, where="", error="", awaited=awaited))
    words = [str(wait) for wait in waits]
    if len(words) > _MOST_SHOWN:
        words[1 : 2 - _MOST_SHOWN] = ["..."]
    if silent:
        verb = "have" if len(silent) > 1 else "has"
        words.append(f"{others(tuple(silent), -1)} {verb} reported nothing")
    else:
        words.append("they wait for one another: a message between them was lost, or never sent")
    return "; " + "; ".join(words)


def _follow(board: Board, start: Failure) -> tuple[list[Failure], list[int]]:
    """The waits of those for whom `start` waits, of those for whom these wait, and so on; and who does not.

    Of a group whose members wait together, those count that do something else.
    """
    found: list[Failure] = []
    silent: list[int] = []
    seen = {start.rank}
    ahead = deque((other, start) for other in start.awaited)
    while ahead:
        rank, before = ahead.popleft()
        if rank in seen:
            continue
        seen.add(rank)
        wait = board.wait_of(rank)
        if wait is None:
            silent.append(rank)
        elif len(wait.members) == 2 or wait.members != before.members:
            found.append(wait)
            ahead.extend((other, wait) for other in wait.awaited)
    return found, silent


class Channel(abc.ABC):
    """One end of a private, ordered, two-way line between `rank` and `peer`.

    It has a communicator of its own: traffic elsewhere neither delays nor reorders it. Tensors are
    contiguous CPU tensors, and sizes are not checked here (see `wire`): a receive must be posted
    with exactly the dtype and number of elements that the peer sends.

    A channel of `Fabric.over_devices` has tensors of a device instead. There "must not" holds for the
    device: a post comes behind what the current stream has to do by then, and `Work.wait` lets the
    current stream wait, not the host.
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

    def drain(self) -> None:  # noqa: B027 - nothing to do where `Work.wait` blocks the host
        """Block until all that was posted, and waited on, is done. Raises PeerTimeoutError."""

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

    def over_devices(self, device: torch.device) -> Fabric:
        """Channels between the accelerators of the same ranks; `device` is this rank's. Local.

        Raises ConfigError where there is no such path; `paths` knows before whether there is.
        """
        raise ConfigError(f"{type(self).__name__} has no path between accelerators, here {device}")
