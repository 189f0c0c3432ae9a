"""Ranks whose CPU counts as a device: everything takes the staged way, and its order is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from piper_owner.streams import CheckedStreams, Stream, checked_streams
from piper_owner.transport.base import Channel, Fabric, Group, Work
from piper_owner.transport.wire import HEADER_BYTES

__all__ = ["DirectChannel", "StagedFabric", "staged"]


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

    def over_devices(self, device: torch.device) -> Fabric:
        """Channels as NCCL's would be."""
        return _DirectFabric(self._inner, self._streams)


class _DirectFabric(StagedFabric):
    def channel(self, peer: int, purpose: str) -> Channel:
        return DirectChannel(self._inner.channel(peer, purpose), self._streams)


class DirectChannel(Channel):
    """Stands in for NCCL: a stream for each direction, which waits for the current one at each post.

    The host waits for nothing but what a GPU would wait for. What is to be received is spoilt at the
    post, as a transport may write to it from then on.
    """

    def __init__(self, inner: Channel, streams: CheckedStreams) -> None:
        self.rank, self.peer, self.timeout = inner.rank, inner.peer, inner.timeout
        self._inner, self._streams = inner, streams

    def _started(self, what: str, tensor: torch.Tensor) -> Stream:
        stream = self._streams.side(f"{what} {self.peer}")
        stream.wait_event(self._streams.current().record())
        self._streams.record_stream(tensor, stream)
        return stream

    def post_send(self, tensor: torch.Tensor) -> Work:
        """Reads on the device until it is waited on."""
        assert tensor.is_contiguous()
        stream = self._started("send to", tensor)
        with self._streams.on(stream):
            taken = tensor.clone()
        with _disable_current_modes():
            return _DirectWork(self._inner.post_send(taken), self._streams, stream)

    def post_recv(self, tensor: torch.Tensor) -> Work:
        """Writes on the device until it is waited on."""
        assert tensor.is_contiguous()
        stream = self._started("receive from", tensor)
        arrived = self._streams.host_buffer(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        with self._streams.on(stream):
            tensor.copy_(torch.full_like(tensor, 77))
        with _disable_current_modes():
            work = self._inner.post_recv(arrived)
        return _DirectWork(work, self._streams, stream, tensor, arrived)

    def close(self) -> None:
        """As it is."""
        self._inner.close()


class _DirectWork:
    def __init__(
        self,
        inner: Work,
        streams: CheckedStreams,
        stream: Stream,
        target: torch.Tensor | None = None,
        arrived: torch.Tensor | None = None,
    ) -> None:
        self._inner, self._streams, self._stream = inner, streams, stream
        self._target, self._arrived = target, arrived

    def wait(self) -> None:
        """Let the current stream wait."""
        self._inner.wait()
        if self._target is not None and self._arrived is not None:
            with self._streams.on(self._stream), torch.no_grad():
                self._target.copy_(self._arrived)
            self._target = None
        self._streams.current().wait_event(self._stream.record())
