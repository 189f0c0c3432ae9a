"""The in-memory transport: all ranks are threads of one process.

A fake, not a mock: it passes the contract tests of the real transports, and whole training runs
go over it. A send copies the tensor when it is posted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch

from piper_owner.transport.base import Board, Channel, Fabric, Failure, Group, Work, lost, timed_out

__all__ = ["MemoryFabric", "MemoryNetwork"]


class _Line:
    """Messages of one direction of one channel."""

    def __init__(self) -> None:
        self.messages: deque[torch.Tensor] = deque()
        self.taken = 0  # messages received so far
        self.posted = 0  # messages sent so far
        self.closed = False


class _MemoryBoard(Board):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: Failure | None = None

    def report(self, failure: Failure) -> None:
        with self._lock:
            self._first = self._first or failure

    def first(self) -> Failure | None:
        with self._lock:
            return self._first


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

    def wait_for(self, ready: Callable[[], bool], failed: Callable[[], bool], rank: int, peer: str) -> None:
        """Block, holding `changed`, until `ready()`; a peer that closed or a timeout raises."""
        arrived = self.changed.wait_for(lambda: ready() or failed(), self.timeout.total_seconds())
        if ready():
            return
        if arrived:
            raise lost(self.board, rank, peer, "it closed the channel")
        raise timed_out(self.board, rank, peer, self.timeout)


class _MemoryWork:
    """Message number `number` of `line`: done when it was taken."""

    def __init__(
        self, channel: _MemoryChannel, line: _Line, number: int, target: torch.Tensor | None
    ) -> None:
        self._channel, self._line, self._number, self._target = channel, line, number, target
        self._done = False

    def wait(self) -> None:
        if self._done:
            return
        self._done = True
        network, line, peer = self._channel.network, self._line, f"rank {self._channel.peer}"
        with network.changed:
            if self._target is None:
                network.wait_for(
                    lambda: line.taken > self._number, lambda: line.closed, self._channel.rank, peer
                )
                return
            network.wait_for(
                lambda: line.taken == self._number and bool(line.messages),
                lambda: line.closed,
                self._channel.rank,
                peer,
            )
            message = line.messages.popleft()
            line.taken += 1
            network.changed.notify_all()
        if message.dtype != self._target.dtype or message.numel() != self._target.numel():
            raise AssertionError(
                f"a receive of {self._target.dtype} {tuple(self._target.shape)} was posted for a message "
                f"of {message.dtype} {tuple(message.shape)}: wire.py checks the header first"
            )
        self._target.copy_(message.view(self._target.shape))


class _MemoryChannel(Channel):
    def __init__(self, network: MemoryNetwork, rank: int, peer: int, purpose: str) -> None:
        self.network, self.rank, self.peer, self.timeout = network, rank, peer, network.timeout
        self._out = network.line(purpose, rank, peer)
        self._in = network.line(purpose, peer, rank)
        self._received = 0

    def post_send(self, tensor: torch.Tensor) -> Work:
        with self.network.changed:
            if self._out.closed:
                raise lost(self.network.board, self.rank, f"rank {self.peer}", "the channel is closed")
            self._out.messages.append(tensor.detach().clone())
            number = self._out.posted
            self._out.posted += 1
            self.network.changed.notify_all()
        return _MemoryWork(self, self._out, number, None)

    def post_recv(self, tensor: torch.Tensor) -> Work:
        number = self._received
        self._received += 1
        return _MemoryWork(self, self._in, number, tensor)

    def close(self) -> None:
        with self.network.changed:
            self._out.closed = True
            self._in.closed = True
            self.network.changed.notify_all()


class _Round:
    """One all-reduce after another over the same ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.number = 0
        self.shares: dict[int, torch.Tensor] = {}
        self.sums: dict[int, tuple[torch.Tensor, int]] = {}
        self.closed = False


class _MemoryGroup(Group):
    def __init__(self, network: MemoryNetwork, rank: int, ranks: tuple[int, ...], purpose: str) -> None:
        self.ranks = ranks
        self._network, self._rank = network, rank
        self._round = network.round(purpose, ranks)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        state, network = self._round, self._network
        with network.changed:
            number = state.number
            state.shares[self._rank] = tensor.detach().clone()
            if len(state.shares) == state.size:
                total = torch.zeros_like(tensor)
                for rank in self.ranks:
                    total += state.shares[rank]
                state.shares = {}
                state.sums[number] = (total, state.size)
                state.number += 1
                network.changed.notify_all()
            network.wait_for(
                lambda: number in state.sums, lambda: state.closed, self._rank, f"ranks {self.ranks}"
            )
            total, readers = state.sums.pop(number)
            if readers > 1:
                state.sums[number] = (total, readers - 1)
        tensor.copy_(total)

    def close(self) -> None:
        with self._network.changed:
            self._round.closed = True
            self._network.changed.notify_all()


class MemoryFabric(Fabric):
    """One rank's view of a `MemoryNetwork`. Opening needs no peer, so it never waits."""

    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        self.rank, self.world_size, self.timeout = rank, network.world_size, network.timeout
        self.board: Board = network.board
        self._network = network

    def channel(self, peer: int, purpose: str) -> Channel:
        """This rank's end of the line to `peer`."""
        return _MemoryChannel(self._network, self.rank, peer, purpose)

    def group(self, ranks: tuple[int, ...], purpose: str) -> Group:
        """The group over `ranks`."""
        return _MemoryGroup(self._network, self.rank, ranks, purpose)
