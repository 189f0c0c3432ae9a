"""Takes snapshots of one rank, sends a copy of each to the next rank, and takes the rank back to one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, nn

from piper_owner.errors import ExchangeError, PeerTimeoutError
from piper_owner.executor.keeping import Keeper
from piper_owner.executor.randomness import random_states, set_random_states
from piper_owner.executor.rank import RankExecutor
from piper_owner.executor.snapshots import Shelf, Snapshot, pack, peer_of, unpack
from piper_owner.rows import RowsParameter
from piper_owner.transport.base import Fabric
from piper_owner.transport.messages import Line
from piper_owner.transport.wire import Header, Phase

__all__ = ["Replicator"]

_SUBJECT: Final = "the state of a rank"
_RANDOM: Final = "random/"


class Replicator:
    """The snapshots of one rank of a run. `take` and `restore` are collective over all ranks.

    A snapshot counts when every rank has its own and the copy that it keeps for the rank before it.
    Until then the one before stays: each rank has at most two of its own, and two copies.
    """

    def __init__(
        self,
        executor: RankExecutor,
        modules: Sequence[nn.Module],
        keeper: Keeper,
        fabric: Fabric,
        shelf: Shelf,
        *,
        chunk_bytes: int,
    ) -> None:
        self._executor, self._modules, self._keeper = executor, modules, keeper
        self._fabric, self._shelf, self._chunk_bytes = fabric, shelf, chunk_bytes
        self._lines: dict[int, Line] | None = None
        self._sending: threading.Thread | None = None
        self._error: ExchangeError | None = None
        self._last: int | None = None

    def take(self) -> None:
        """Keep the state after the last step; the copy travels while training goes on.

        Waits until that of the snapshot before has arrived everywhere, and raises what went wrong with it.
        """
        self._keeper.together(self._settle)
        if self._last is not None:
            self._shelf.keep_from(self._last)
        step = self._last = self._executor.step
        tensors = dict(self._state())
        values = {key: value for key, value in tensors.items() if not isinstance(value, Tensor)}
        tensors = {key: value for key, value in tensors.items() if isinstance(value, Tensor)}
        snapshot = pack(step, tensors, {"state": values, "losses": self._keeper.losses})
        self._shelf.own[step] = snapshot
        if self._fabric.world_size > 1:
            lines = self._open()
            work = (lines, snapshot)
            self._sending = threading.Thread(target=self._exchange, args=work, name="snapshot", daemon=True)
            self._sending.start()

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Take this rank back to `snapshot`, bit for bit; each rank to its own of the same step."""
        tensors, values = unpack(snapshot)
        for key, tensor in self._weights():
            tensor.copy_(tensors.pop(key)[0])
        for prefix, optimizer, parameter in self._stepped():
            optimizer.state.pop(parameter, None)
            state = {
                key.removeprefix(prefix): value.clone() if on_cpu else value.to(parameter.device, copy=True)
                for key, (value, on_cpu) in tensors.items()
                if key.startswith(prefix)
            }
            plain = {
                key.removeprefix(prefix): value
                for key, value in values["state"].items()
                if key.startswith(prefix)
            }
            if state or plain:
                optimizer.state[parameter] = state | plain
        self._keeper.go_on(values["losses"])
        self._executor.resume(snapshot.step)
        drawn = {
            key.removeprefix(_RANDOM): state for key, (state, _) in tensors.items() if key.startswith(_RANDOM)
        }
        set_random_states(drawn)

    def close(self) -> None:
        """Wait for the copies that are on their way, then give the lines up. Twice is fine."""
        try:
            self._settle()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Give the lines up at once. Local; twice is fine."""
        for line in (self._lines or {}).values():
            line.close()

    def _settle(self) -> str:
        """Wait for the copies that are on their way."""
        thread, self._sending = self._sending, None
        if thread is not None:
            longest = 2 * self._fabric.timeout + timedelta(seconds=1)
            thread.join(longest.total_seconds())
            if thread.is_alive():
                raise PeerTimeoutError(
                    f"rank {self._fabric.rank}: the copy of a snapshot was not there within "
                    f"{longest.total_seconds():g} s; a larger --snapshot N leaves it more time"
                )
        error, self._error = self._error, None
        if error is not None:
            raise error
        return ""

    def _exchange(self, lines: dict[int, Line], snapshot: Snapshot) -> None:
        """Send this rank's snapshot to the next rank, and receive that of the rank before."""
        rank, size = self._fabric.rank, self._fabric.world_size
        data = torch.from_numpy(snapshot.data)
        header = Header(
            phase=Phase.SNAPSHOT,
            subject=_SUBJECT,
            step=snapshot.step,
            dtype=torch.uint8,
            shape=tuple(data.shape),
        )
        line = lines[peer_of(rank, size)]
        try:
            line.send(header, data)
            arrived = lines[(rank - 1) % size].receive(header, any_tensor=True).tensor()
            assert arrived is not None, "a snapshot is never absent"
            self._shelf.copies[snapshot.step] = Snapshot(step=snapshot.step, data=arrived.numpy())
            line.flush()
        except ExchangeError as error:  # raised on all ranks when the next one is due
            self._error = error

    def _open(self) -> dict[int, Line]:
        """The lines to the next rank and from the one before; all ranks open theirs in one order."""
        if self._lines is None:
            size = self._fabric.world_size
            pairs = {tuple(sorted((rank, peer_of(rank, size)))) for rank in range(size)}
            self._lines = {}
            for low, high in sorted(pairs):
                if self._fabric.rank in (low, high):
                    peer = high if self._fabric.rank == low else low
                    channel = self._fabric.channel(peer, "snapshot")
                    self._lines[peer] = Line(channel, chunk_bytes=self._chunk_bytes)
        return self._lines

    # -- what a rank has. Options of its optimizers are not among it: no step changes them.

    def _state(self) -> Iterator[tuple[str, Any]]:
        for device, state in random_states():
            yield _RANDOM + device, state
        yield from self._weights()
        for prefix, optimizer, parameter in self._stepped():
            for key, value in optimizer.state.get(parameter, {}).items():
                dense = isinstance(value, Tensor) and value.is_sparse
                yield prefix + key, value.to_dense() if dense else value

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer, once. Rows of a table are not kept: they are fetched anew."""
        seen: set[int] = set()
        for number, module in enumerate(self._modules):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if id(tensor) not in seen and not isinstance(tensor, RowsParameter):
                    seen.add(id(tensor))
                    yield f"weight/{number}/{name}", tensor.detach()

    def _stepped(self) -> Iterator[tuple[str, torch.optim.Optimizer, Tensor]]:
        """Every parameter that an optimizer of this rank steps, and what the keys of its state begin with."""
        for bucket in self._executor.buckets.values():
            if bucket.optimizer is not None:
                parameters = (p for group in bucket.optimizer.param_groups for p in group["params"])
                for number, parameter in enumerate(parameters):
                    yield f"state/{bucket.name}/{number}/", bucket.optimizer, parameter
