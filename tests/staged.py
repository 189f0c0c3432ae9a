"""Ranks whose CPU counts as a device: everything takes the staged way, and its order is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from piper_owner.streams import CheckedStreams, checked_streams
from piper_owner.transport.base import Channel, Fabric, Group, Work
from piper_owner.transport.wire import HEADER_BYTES

__all__ = ["StagedFabric", "staged"]


@contextmanager
def staged(fabric: Fabric) -> Iterator[tuple[StagedFabric, CheckedStreams]]:
    """`fabric` of this thread as that of a rank on a device, and the streams of it."""
    with checked_streams() as streams:
        yield StagedFabric(fabric, streams), streams


class _Work:
    def __init__(self, inner: Work, still: Callable[[], object]) -> None:
        self._inner, self._still = inner, still
        self._is_waited = False

    def wait(self) -> None:
        self._inner.wait()
        if not self._is_waited:
            self._is_waited = True
            self._still()  # nobody else may have used it in between


class StagedChannel(Channel):
    """Tells the streams what the host does with the memory of messages: it never touches a device's own."""

    def __init__(self, inner: Channel, streams: CheckedStreams) -> None:
        self.rank, self.peer, self.timeout = inner.rank, inner.peer, inner.timeout
        self._inner, self._streams = inner, streams
        self.largest = 0

    def post_send(self, tensor: torch.Tensor) -> Work:
        """Reads from now until it is waited on."""
        return self._posted(self._inner.post_send, self._streams.host_reads, tensor, "a send")

    def post_recv(self, tensor: torch.Tensor) -> Work:
        """Writes from now until it is waited on."""
        return self._posted(self._inner.post_recv, self._streams.host_writes, tensor, "a receive")

    def _posted(
        self,
        post: Callable[[torch.Tensor], Work],
        use: Callable[[torch.Tensor, str, str | None], str],
        tensor: torch.Tensor,
        what: str,
    ) -> Work:
        is_header = tensor.dtype == torch.uint8 and tensor.numel() == HEADER_BYTES  # made on the host
        thread = "" if is_header else use(tensor, what, None)
        with _disable_current_modes():  # the transport in memory copies, as the host does
            work = post(tensor)
        return work if is_header else _Work(work, lambda: use(tensor, what, thread))

    def close(self) -> None:
        """As it is."""
        self._inner.close()


class StagedFabric(Fabric):
    """Gives such channels; groups, which have tensors of the host, as they are."""

    def __init__(self, inner: Fabric, streams: CheckedStreams) -> None:
        self.rank, self.world_size, self.timeout = inner.rank, inner.world_size, inner.timeout
        self.board = inner.board
        self._inner, self._streams = inner, streams

    def channel(self, peer: int, purpose: str) -> Channel:
        """A checked end."""
        return StagedChannel(self._inner.channel(peer, purpose), self._streams)

    def group(self, ranks: tuple[int, ...], purpose: str) -> Group:
        """As it is."""
        return self._inner.group(ranks, purpose)
