"""The in-memory transport: all ranks are threads of one process.

A fake, not a mock: it passes the contract tests of the real transports, and whole training runs
go over it. A send copies the tensor when it is posted.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter, deque
from collections.abc import Callable
from datetime import timedelta
from typing import assert_never

import torch

from piper_owner.errors import ExchangeError
from piper_owner.transport.base import (
    Board,
    Channel,
    Fabric,
    Failure,
    Group,
    Work,
    closed_here,
    lost,
    timed_out,
)

__all__ = ["MemoryFabric", "MemoryNetwork"]


class _End(enum.Enum):
    """How a wait ended."""

    READY = "ready"
    CLOSED = "closed"
    TIMED_OUT = "timed out"


class _Line:
    """Messages of one direction of one channel, and the buffers posted for them."""

    def __init__(self) -> None:
        self.messages: deque[torch.Tensor] = deque()
        self.buffers: deque[torch.Tensor] = deque()
        self.taken = 0  # messages received so far
        self.sent = 0  # messages posted so far
        self.awaited = 0  # buffers posted so far
        self.closed = False
        self.ends = 2  # ends that have not closed

    def deliver(self) -> None:
        """Put the messages that have a buffer into it, in order."""
        while self.messages and self.buffers and not self.closed:
            message, buffer = self.messages.popleft(), self.buffers.popleft()
            if message.dtype != buffer.dtype or message.numel() != buffer.numel():
                raise AssertionError(
                    f"a receive of {buffer.dtype} {tuple(buffer.shape)} was posted for a message of "
                    f"{message.dtype} {tuple(message.shape)}: wire.py checks the header first"
                )
            buffer.copy_(message.view(buffer.shape))
            self.taken += 1


class _MemoryBoard(Board):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: Failure | None = None
        self._waits: dict[int, Failure] = {}

    def report(self, failure: Failure) -> None:
        with self._lock:
            if failure.awaited:
                self._waits.setdefault(failure.rank, failure)
            else:
                self._first = self._first or failure

    def first(self) -> Failure | None:
        with self._lock:
            return self._first

    def wait_of(self, rank: int) -> Failure | None:
        with self._lock:
            return self._waits.get(rank)


class MemoryNetwork:
    """What the ranks of one process share; `fabric(rank)` is one rank's view of it."""

    def __init__(self, world_size: int, *, timeout: timedelta) -> None:
        self.world_size, self.timeout = world_size, timeout
        self.board: Board = _MemoryBoard()
        self.changed = threading.Condition()
        self._lines: dict[tuple[str, int, int], _Line] = {}
        self._rounds: dict[tuple[str, tuple[int, ...]], _Round] = {}

    def fabric(self, rank: int) -> MemoryFabric:
        """The network as `rank` sees it."""
        return MemoryFabric(self, rank)

    def line(self, purpose: str, source: int, target: int) -> _Line:
        """The one direction of a channel from `source` to `target`."""
        with self.changed:
            return self._lines.setdefault((purpose, source, target), _Line())

    def round(self, purpose: str, ranks: tuple[int, ...]) -> _Round:
        """The shared state of one group."""
        with self.changed:
            return self._rounds.setdefault((purpose, ranks), _Round(len(ranks)))

    def forget(self, line: _Line) -> None:
        """One of the two ends of `line` has closed."""
        line.closed = True
        line.ends -= 1
        if line.ends == 0:
            self._lines = {key: other for key, other in self._lines.items() if other is not line}

    def forget_round(self, state: _Round) -> None:
        """One of the members of a group has closed."""
        state.closed = True
        state.members -= 1
        if state.members == 0:
            self._rounds = {key: other for key, other in self._rounds.items() if other is not state}

    def wait_for(self, ready: Callable[[], bool], failed: Callable[[], bool], timeout: timedelta) -> _End:
        """Block, holding `changed`, until `ready()`, or `failed()`, or the time is up."""
        arrived = self.changed.wait_for(lambda: ready() or failed(), timeout.total_seconds())
        if ready():
            return _End.READY
        return _End.CLOSED if arrived else _End.TIMED_OUT


def _check_end(end: _End, fabric: MemoryFabric, ranks: tuple[int, ...]) -> None:
    """Raise for a wait of the fabric's rank for the others of `ranks` that ended badly.

    Not while holding `changed`: it gives the others time to say why.
    """
    match end:
        case _End.READY:
            return
        case _End.CLOSED:
            raise lost(fabric.board, fabric.rank, ranks, "it is closed")
        case _End.TIMED_OUT:
            raise timed_out(fabric.board, fabric.rank, ranks, fabric.timeout)
        case _:
            assert_never(end)


class _MemoryWork:
    """Message number `number` of `line`: done when it was taken."""

    def __init__(self, channel: _MemoryChannel, line: _Line, number: int) -> None:
        self._channel, self._line, self._number = channel, line, number
        self._is_waited = False

    def wait(self) -> None:
        if self._is_waited:
            return
        self._is_waited = True
        channel, line = self._channel, self._line
        network = channel.fabric.network
        try:
            with network.changed:
                end = network.wait_for(
                    lambda: line.taken > self._number, lambda: line.closed, channel.timeout
                )
            _check_end(end, channel.fabric, (channel.peer,))
        except ExchangeError:
            channel.close()
            raise


class _MemoryChannel(Channel):
    def __init__(self, fabric: MemoryFabric, peer: int, purpose: str) -> None:
        self.fabric, self.rank, self.peer, self.timeout = fabric, fabric.rank, peer, fabric.timeout
        self._network = network = fabric.network
        self._out = network.line(purpose, self.rank, peer)
        self._in = network.line(purpose, peer, self.rank)
        self._is_closed = False

    def post_send(self, tensor: torch.Tensor) -> Work:
        with self._network.changed:
            self._check_open()
            self._out.messages.append(tensor.detach().clone())
            self._out.sent += 1
            return self._posted(self._out, self._out.sent - 1)

    def post_recv(self, tensor: torch.Tensor) -> Work:
        with self._network.changed:
            self._check_open()
            self._in.buffers.append(tensor.detach())
            self._in.awaited += 1
            return self._posted(self._in, self._in.awaited - 1)

    def _posted(self, line: _Line, number: int) -> Work:
        line.deliver()
        self._network.changed.notify_all()
        return _MemoryWork(self, line, number)

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed_here(self.fabric.board, self.rank, (self.peer,), "this end of the channel")

    def close(self) -> None:
        with self._network.changed:
            if not self._is_closed:
                self._is_closed = True
                self._network.forget(self._out)
                self._network.forget(self._in)
                self._network.changed.notify_all()


class _Round:
    """One all-reduce after another over the same ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.number = 0
        self.shares: dict[int, torch.Tensor] = {}
        self.sums: dict[int, tuple[torch.Tensor, int]] = {}
        self.closed = False
        self.members = size  # ranks that have not closed


class _MemoryGroup(Group):
    def __init__(self, fabric: MemoryFabric, ranks: tuple[int, ...], purpose: str) -> None:
        self.ranks = ranks
        self._fabric, self._network, self._rank = fabric, fabric.network, fabric.rank
        self._round = self._network.round(purpose, ranks)
        self._is_closed = False

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._sum(tensor))

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        total = self._sum(tensor)
        if self._rank == root:
            tensor.copy_(total)
        else:
            tensor.zero_()  # the contract leaves it open, so nobody may count on the old value

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        # The sum of bits, not of values: -0.0 + 0.0 is 0.0.
        mine = tensor.detach().reshape(-1).view(torch.uint8).clone()
        if self._rank != root:
            mine.zero_()
        tensor.detach().reshape(-1).view(torch.uint8).copy_(self._sum(mine))

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        state, network = self._round, self._network
        try:
            with network.changed:
                number = state.number
                self._share(tensor, number)
                end = network.wait_for(lambda: number in state.sums, lambda: state.closed, network.timeout)
                if end is _End.READY:
                    total, readers = state.sums.pop(number)
                    if readers > 1:
                        state.sums[number] = (total, readers - 1)
                    return total
            _check_end(end, self._fabric, self.ranks)
            raise AssertionError("_check_end raises for every end but READY")
        except ExchangeError:
            self.close()
            raise

    def _share(self, tensor: torch.Tensor, number: int) -> None:
        """Put this rank's share down; the last one to do so adds them."""
        state = self._round
        if state.closed:
            return  # the wait says so
        state.shares[self._rank] = tensor.detach().clone()
        if len(state.shares) == state.size:
            total = torch.zeros_like(tensor)
            for rank in self.ranks:
                total += state.shares[rank]
            state.shares = {}
            state.sums[number] = (total, state.size)
            state.number += 1
            self._network.changed.notify_all()

    def close(self) -> None:
        with self._network.changed:
            if not self._is_closed:
                self._is_closed = True
                self._network.forget_round(self._round)
                self._network.changed.notify_all()


class MemoryFabric(Fabric):
    """One rank's view of a `MemoryNetwork`. Opening needs no peer, so it never waits."""

    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        self.rank, self.world_size, self.timeout = rank, network.world_size, network.timeout
        self.board: Board = network.board
        self.network = network
        self._opened: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def channel(self, peer: int, purpose: str) -> Channel:
        """This rank's end of the line to `peer`."""
        pair = (min(self.rank, peer), max(self.rank, peer))
        return _MemoryChannel(self, peer, self._numbered(purpose, pair))

    def group(self, ranks: tuple[int, ...], purpose: str) -> Group:
        """The group over `ranks`."""
        return _MemoryGroup(self, ranks, self._numbered(purpose, ranks))

    def _numbered(self, purpose: str, ranks: tuple[int, ...]) -> str:
        """`purpose` with how often this rank has opened it before, so that each opening is a new line."""
        number = self._opened[purpose, ranks]
        self._opened[purpose, ranks] += 1
        return f"{purpose}/{number}"
