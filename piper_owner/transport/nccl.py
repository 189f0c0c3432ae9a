"""The NCCL transport: payloads from GPU to GPU. Headers, groups and the board stay those of gloo.

A channel has two communicators of two ranks, one for each direction, each with a stream of its own:
sends and receives of one communicator run one after the other, and two ranks that both send first
would wait for each other. They are made when the channel is opened, and used once, so that no
communicator is made in the midst of a step, where the ranks come in different orders.

Nothing here makes the host wait for the device. A post starts behind what the current stream has to do
by then, and `Work.wait` lets the current stream wait. So a peer that dies shows on gloo, where its next
header stays away; a payload that is announced and does not come is found out when a later post or wait
sees one that is older than the timeout, or by torch's watchdog, which ends the process after twice that.

Not run yet: it takes two GPUs.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch._C._distributed_c10d import Work as C10dWork

from piper_owner.errors import ConfigError, PeerTimeoutError
from piper_owner.streams import streams_of
from piper_owner.transport.base import (
    Board,
    Channel,
    Fabric,
    Group,
    Work,
    cause,
    closed_here,
    lost,
    timed_out,
)

__all__ = ["NcclChannel", "NcclFabric"]

_FIRST: Final = 1.0
"""What the first message of a communicator holds."""
_NAP: Final = 1e-3


class _Communicator(Protocol):
    """What is used of an NCCL process group."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> C10dWork: ...
    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> C10dWork: ...
    def abort(self) -> None: ...


MakeCommunicator = Callable[[Store, int, timedelta], _Communicator]
"""Makes one of two ranks: on a store of its own, as rank 0 or 1, with a timeout."""


def _nccl(store: Store, rank: int, timeout: timedelta) -> _Communicator:
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    # Later than our own checks, which name what is missing: the watchdog ends the process.
    options._timeout = 2 * timeout
    return cast("_Communicator", kind(store, rank, 2, options))


class _NcclWork:
    def __init__(self, channel: NcclChannel, work: C10dWork) -> None:
        self._channel = channel
        self._work: C10dWork | None = work

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            self._channel.finish(work)


class NcclChannel(Channel):
    """Payloads between two GPUs; tensors are contiguous and on this rank's GPU.

    May be used from two threads, one that posts sends and one that posts receives.
    """

    def __init__(self, fabric: NcclFabric, peer: int, purpose: str) -> None:
        self.rank, self.peer, self.timeout, self.board = fabric.rank, peer, fabric.timeout, fabric.board
        pair = (min(self.rank, peer), max(self.rank, peer))
        self._mine, self._other = pair.index(self.rank), pair.index(peer)
        self._device = fabric.device
        self._lock = threading.Lock()
        self._pending: deque[tuple[C10dWork, float]] = deque()
        self._is_closed = False
        # In one order at both ends: first from the lower rank to the higher one, then back.
        made = [fabric.make_communicator(pair, f"{purpose}/{direction}") for direction in ("up", "down")]
        self._out, self._in = (made[0], made[1]) if self.rank == pair[0] else (made[1], made[0])
        for sends in (self.rank == pair[0], self.rank != pair[0]):
            self._try_out(sends=sends)

    def _try_out(self, *, sends: bool) -> None:
        """Send, or receive, a first message, and wait for it: that makes the communicator."""
        streams = streams_of(self._device)
        probe = torch.full((1,), _FIRST if sends else 0.0, device=self._device)
        (self.post_send(probe) if sends else self.post_recv(probe)).wait()
        if streams is not None:
            streams.current().record().synchronize(self.timeout)
        if float(probe) != _FIRST:
            raise ConfigError(
                f"NCCL between rank {self.rank} and rank {self.peer} gave a wrong value for the first "
                "message; see NCCL_DEBUG=INFO, and the settings of the links between these GPUs"
            )

    def post_send(self, tensor: torch.Tensor) -> Work:
        """Start sending `tensor`, as it is on the current stream. Does not wait."""
        return self._post(self._out.send, tensor)

    def post_recv(self, tensor: torch.Tensor) -> Work:
        """Start receiving into `tensor`, behind what the current stream has to do. Does not wait."""
        return self._post(self._in.recv, tensor)

    def _post(self, start: Callable[[list[torch.Tensor], int, int], C10dWork], tensor: torch.Tensor) -> Work:
        if self._is_closed:
            raise closed_here(self.board, self.rank, (self.peer,), "this end of the channel")
        self._look_for_overdue()
        try:
            work = start([tensor], self._other, 0)
        except RuntimeError as error:
            raise self._broken(error) from error
        with self._lock:
            self._pending.append((work, time.monotonic()))
        return _NcclWork(self, work)

    def finish(self, work: C10dWork) -> None:
        """Let the current stream wait for `work`. The host does not."""
        self._look_for_overdue()
        try:
            work.wait()
        except RuntimeError as error:
            raise self._broken(error) from error

    def drain(self) -> None:
        """Block the host until all that was posted is done. Raises PeerTimeoutError after the timeout."""
        while self._look_for_overdue():
            time.sleep(_NAP)

    def _look_for_overdue(self) -> int:
        """Forget what is done; how much is not. Raises PeerTimeoutError if that is older than the timeout."""
        with self._lock:
            self._pending = deque(each for each in self._pending if not each[0].is_completed())
            oldest = min((started for _, started in self._pending), default=None)
            count = len(self._pending)
        if oldest is not None and time.monotonic() - oldest > self.timeout.total_seconds():
            error = timed_out(self.board, self.rank, (self.peer,), self.timeout)
            self.close()
            raise error
        return count

    def _broken(self, error: RuntimeError) -> Exception:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        explained = lost(self.board, self.rank, (self.peer,), first)
        self.close()
        return explained

    def close(self) -> None:
        """Give both communicators up, and what is on its way with them. Twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        for communicator in (self._out, self._in):
            communicator.abort()


class NcclFabric(Fabric):
    """Channels between the GPUs of the ranks of a fabric over `store`; `device` is this rank's.

    `control` is the fabric beneath, whose groups and board are its own. `make` is NCCL's, or another
    one for tests.
    """

    def __init__(
        self, control: Fabric, store: Store, device: torch.device, *, make: MakeCommunicator = _nccl
    ) -> None:
        self.rank, self.world_size, self.timeout = control.rank, control.world_size, control.timeout
        self.board: Board = control.board
        self.device = device
        self._control, self._store, self._make = control, store, make
        self._opened: Counter[tuple[str, tuple[int, int]]] = Counter()

    def channel(self, peer: int, purpose: str) -> Channel:
        """This rank's end of a new line to the GPU of `peer`; collective over the two."""
        return NcclChannel(self, peer, purpose)

    def group(self, ranks: tuple[int, ...], purpose: str) -> Group:
        """A group of the fabric beneath, for tensors of the CPU."""
        return self._control.group(ranks, purpose)

    def make_communicator(self, pair: tuple[int, int], purpose: str) -> _Communicator:
        """One over two ranks under a store prefix of its own; collective over them."""
        number = self._opened[purpose, pair]
        self._opened[purpose, pair] += 1
        prefix = f"nccl/{purpose}/{'-'.join(map(str, pair))}/{number}"
        try:
            return self._make(PrefixStore(prefix, self._store), pair.index(self.rank), self.timeout)
        except (dist.DistStoreError, RuntimeError) as error:
            peer = pair[1 - pair.index(self.rank)]
            raise PeerTimeoutError(
                f"rank {self.rank} could not open an NCCL communicator to rank {peer} for {purpose!r}: "
                f"{(str(error).splitlines() or [''])[0]}{cause(self.board, self.rank, (peer,))}"
            ) from error
