"""The gloo transport: one process group of two ranks for each channel, built directly on a store.

`torch.distributed.new_group` is collective over the whole world, and with
`use_local_synchronization` it hangs when a rank is in two pairs: the name of the group hashes a
counter that differs between members. A `ProcessGroupGloo` made on a prefix of a store needs only
its own members, and fails within its timeout when one never comes.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch._C._distributed_c10d import Work as C10dWork

from piper_owner.errors import PeerTimeoutError
from piper_owner.transport.base import (
    Board,
    Channel,
    Fabric,
    Failure,
    Group,
    Work,
    closed_here,
    lost,
    others,
    timed_out,
    waited,
)
from piper_owner.transport.nccl import NcclFabric

__all__ = ["FailureBoard", "GlooChannel", "GlooFabric", "GlooGroup"]

_BOARD_KEY: Final = "failure"
_BOARD_WAIT: Final = timedelta(seconds=3)
_SOURCE_LOCATION: Final = re.compile(r"\[/[^\]]*\] ?")

# torch's type stubs leave out the methods of this class that torch itself calls.
_Gloo: Final[Any] = dist.ProcessGroupGloo


class _ProcessGroup(Protocol):
    """What is used of a gloo process group."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> C10dWork: ...
    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> C10dWork: ...
    def allreduce(self, tensors: list[torch.Tensor], /) -> C10dWork: ...
    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions, /) -> C10dWork: ...


class FailureBoard(Board):
    """The board on a torch store; the first report stays."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._away_until = 0.0

    def report(self, failure: Failure) -> None:
        """Write `failure` unless somebody wrote before."""
        key = _wait_key(failure.rank) if failure.awaited else _BOARD_KEY
        self._ask(lambda: self._store.compare_set(key, "", failure.to_json()))

    def first(self) -> Failure | None:
        """The first failure of a rank that waited for nobody, or None."""
        return self._read(_BOARD_KEY)

    def wait_of(self, rank: int) -> Failure | None:
        """The failed wait of `rank`, or None."""
        return self._read(_wait_key(rank))

    def _read(self, key: str) -> Failure | None:
        text = self._ask(lambda: self._store.get(key) if self._store.check([key]) else b"")
        return Failure.from_json(text.decode()) if text else None

    def _ask(self, question: Callable[[], bytes]) -> bytes:
        """The store's answer, or nothing where its host is gone, or does not answer in time.

        Some of the store's own calls know no timeout: a host that is stopped would hold the rank
        that is about to say so. Having waited for it in vain, the rank asks nothing for as long again.
        """
        answers: list[bytes] = []
        if time.monotonic() < self._away_until:
            return b""

        def ask() -> None:
            # Whoever asks has an error of its own to show, or nobody left to tell.
            with suppress(dist.DistStoreError, RuntimeError):
                answers.append(question())

        thread = threading.Thread(target=ask, name="failure board", daemon=True)
        thread.start()
        thread.join(_BOARD_WAIT.total_seconds())
        if thread.is_alive():
            self._away_until = time.monotonic() + _BOARD_WAIT.total_seconds()
        return answers[0] if answers else b""


def _wait_key(rank: int) -> str:
    return f"wait/{rank}"


class _GlooWork:
    """A gloo work that is waited on at most once (a second wait of gloo's own hangs)."""

    def __init__(self, work: C10dWork, tensor: torch.Tensor, channel: GlooChannel) -> None:
        self._work: C10dWork | None = work
        self._tensor: torch.Tensor | None = tensor  # the message is lost if its memory goes
        self._channel = channel
        self._is_waited = False

    def wait(self) -> None:
        if self._is_waited:
            return
        self._is_waited = True
        work = self._work
        try:
            if work is None:
                raise self._channel.closed_here()
            self._channel.finish(work)
        finally:
            del work  # the frame of an error would keep the connection open
            self.drop()

    def drop(self) -> None:
        """Let go of gloo's work, which keeps the connection open as long as it lives."""
        self._work = self._tensor = None
        self._channel.pending.discard(self)


class GlooChannel(Channel):
    """A channel over a process group of two ranks."""

    def __init__(self, fabric: GlooFabric, peer: int, purpose: str) -> None:
        self.rank, self.peer, self.timeout, self.board = fabric.rank, peer, fabric.timeout, fabric.board
        pair = (min(self.rank, peer), max(self.rank, peer))
        self._other = pair.index(peer)
        self._group: _ProcessGroup | None = fabric.make_group(pair, purpose)
        self.pending: set[_GlooWork] = set()

    def post_send(self, tensor: torch.Tensor) -> Work:
        """Start sending `tensor`."""
        return self._post("send", tensor)

    def post_recv(self, tensor: torch.Tensor) -> Work:
        """Start receiving into `tensor`."""
        return self._post("recv", tensor)

    def _post(self, what: str, tensor: torch.Tensor) -> Work:
        group = self._group
        if group is None:
            raise self.closed_here()
        try:
            posted = (group.send if what == "send" else group.recv)([tensor], self._other, 0)
        except RuntimeError as error:
            raise self._explain(error) from error
        finally:
            del group  # as in _GlooWork.wait
        work = _GlooWork(posted, tensor, self)
        self.pending.add(work)
        return work

    def finish(self, work: C10dWork) -> None:
        """Wait for gloo's `work`. A failure ends the channel."""
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            raise self._explain(error) from error
        finally:
            del work

    def _explain(self, error: RuntimeError) -> Exception:
        explained = _explain(error, self.board, self.rank, (self.rank, self.peer), self.timeout)
        self.close()
        return explained

    def closed_here(self) -> Exception:
        """The error of using this end after it was closed, or after one of its waits failed."""
        return closed_here(self.board, self.rank, (self.peer,), "this end of the channel")

    def close(self) -> None:
        """Drop the process group and all that is on its way, which closes the sockets."""
        self._group = None
        for work in list(self.pending):
            work.drop()


class GlooGroup(Group):
    """A collective over a process group of its own."""

    def __init__(self, fabric: GlooFabric, ranks: tuple[int, ...], purpose: str) -> None:
        self.ranks = ranks
        self._fabric = fabric
        self._is_closed = False
        self._group: _ProcessGroup | None = None
        if len(ranks) > 1:
            self._group = fabric.make_group(ranks, purpose)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the group."""
        self._run(lambda group: group.allreduce([tensor]))

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        """Sum over the group, on `root`, in a chain: gloo's own reduce sends up to twice as much.

        The rank before the root comes last and passes its tensor on to the one before it, and so on.
        """
        self._check_open()
        size, mine = len(self.ranks), self.ranks.index(self._fabric.rank)
        place = (mine - self.ranks.index(root)) % size
        if place + 1 < size:
            theirs = torch.empty_like(tensor)
            self._run(lambda group: group.recv([theirs], (mine + 1) % size, 0))
            tensor.add_(theirs)
        if place > 0:
            self._run(lambda group: group.send([tensor], (mine - 1) % size, 0))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """The tensor of `root`, everywhere."""
        options = dist.BroadcastOptions()
        options.rootRank = self.ranks.index(root)
        self._run(lambda group: group.broadcast([tensor], options))

    def _run(self, start: Callable[[_ProcessGroup], C10dWork]) -> None:
        self._check_open()
        fabric = self._fabric
        if self._group is None:
            return
        try:
            start(self._group).wait(fabric.timeout)
        except RuntimeError as error:
            explained = _explain(error, fabric.board, fabric.rank, self.ranks, fabric.timeout)
            self.close()  # a member that waits for this one's share fails at once
            raise explained from error

    def _check_open(self) -> None:
        if self._is_closed:
            fabric = self._fabric
            raise closed_here(fabric.board, fabric.rank, self.ranks, "the group")

    def close(self) -> None:
        """Drop the process group."""
        self._is_closed = True
        self._group = None


class GlooFabric(Fabric):
    """Channels and groups over TCP between processes that share `store`.

    `store` is any torch store that all ranks reach; each run gives its own prefix of it.
    `hostname` is the address that this rank listens on and tells its peers (None: torch's choice,
    which follows `GLOO_SOCKET_IFNAME`). Every wait is bounded by `timeout`.
    `opening`, the same at first, bounds those for lines and groups to open, where all ranks set it.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout: timedelta,
        hostname: str | None = None,
    ) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.opening = timeout
        self.board: Board = FailureBoard(store)
        self._store = store
        self._hostname = hostname
        self._opened: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def channel(self, peer: int, purpose: str) -> Channel:
        """This rank's end of a new line to `peer`; collective over the two."""
        return GlooChannel(self, peer, purpose)

    def group(self, ranks: tuple[int, ...], purpose: str) -> Group:
        """A new group over `ranks`; collective over them."""
        return GlooGroup(self, ranks, purpose)

    def over_devices(self, device: torch.device) -> Fabric:
        """Channels of NCCL between the GPUs of the same ranks."""
        return NcclFabric(self, self._store, device)

    def make_group(self, ranks: tuple[int, ...], purpose: str) -> _ProcessGroup:
        """A process group over `ranks` under a store prefix of its own; collective over them."""
        options = _Gloo._Options()
        options._timeout = self.opening
        options._threads = 1
        device = (
            _Gloo.create_default_device()
            if self._hostname is None
            else _Gloo.create_device(hostname=self._hostname)
        )
        options._devices = [device]
        # Numbered: the addresses of an earlier line of the same purpose still stand in the store.
        number = self._opened[purpose, ranks]
        self._opened[purpose, ranks] += 1
        prefix = f"{purpose}/{'-'.join(map(str, ranks))}/{number}"
        try:
            group = _Gloo(PrefixStore(prefix, self._store), ranks.index(self.rank), len(ranks), options)
            group._set_default_timeout(self.timeout)
            return cast("_ProcessGroup", group)
        except (dist.DistStoreError, RuntimeError) as error:
            text = (
                f"rank {self.rank} could not open {purpose!r} to {others(ranks, self.rank)} within "
                f"{self.opening.total_seconds():g} s: every one of the ranks {ranks} must open it "
                f"({_first_line(error)})"
            )
            raise waited(PeerTimeoutError(text), self.board, self.rank, ranks) from error


def _explain(
    error: RuntimeError, board: Board, rank: int, ranks: tuple[int, ...], timeout: timedelta
) -> Exception:
    if "timed out" in str(error).lower():
        return timed_out(board, rank, ranks, timeout)
    return lost(board, rank, ranks, _first_line(error))


def _first_line(error: BaseException) -> str:
    """Gloo's own words, without its source location and without its advice."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    text = _SOURCE_LOCATION.sub("", text)
    return text.split(". This is", 1)[0].encode("ascii", "replace").decode()
