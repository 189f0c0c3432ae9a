"""Takes what lies on a device through memory of the host, two chunks each way.

Sends: a thread per line copies chunk after chunk to the host, on a stream of its own that waits on the
device for the work that made it, and posts it. While one chunk is on the wire the next is copied. The
thread is needed because only two chunks have room: the third waits until the peer has taken the first,
and whoever sends must not. Receives: what has arrived is copied to the device on a second stream, for
which the next use waits there. The host waits for the wire, and for a buffer that is still in use.

Pinned buffers and streams have not run on a device yet; the order of all this is checked on the CPU.
"""

from __future__ import annotations

import itertools
import queue
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import torch

from piper_owner.streams import Event, Stream, Streams
from piper_owner.transport.base import Channel, Work

__all__ = ["Landing", "ReceiveSlots", "StagedSender"]

NUM_SLOTS: Final = 2
_NUMBERS: Final = itertools.count()


class _SharedWork:
    """A work that two threads may wait on; both get its error."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def wait(self) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                self._work.wait()
            except BaseException as error:
                self._error = error
                raise


class _StagedWork:
    """A send that the thread is still to post. After `wait` the tensor may be written, on the device too."""

    def __init__(self, streams: Streams | None) -> None:
        self._streams = streams
        self._is_posted = threading.Event()
        self._work: _SharedWork | None = None
        self._copied: Event | None = None
        self._error: BaseException | None = None

    def wait(self) -> None:
        self._is_posted.wait()  # ends: every wait of the thread has a timeout
        if self._error is not None:
            raise self._error
        assert self._work is not None
        self._work.wait()
        if self._streams is not None and self._copied is not None:
            self._streams.current().wait_event(self._copied)

    def resolve(self, work: _SharedWork, copied: Event | None) -> None:
        """For the thread: `work` was posted, and after `copied` the tensor is not read any more."""
        self._work, self._copied = work, copied
        self._is_posted.set()

    def fail(self, error: BaseException) -> None:
        """For the thread: it could not be posted."""
        self._error = error
        self._is_posted.set()


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor of the host, or one of a device that is complete at `ready`, and what tells of its end."""

    tensor: torch.Tensor
    streams: Streams | None
    ready: Event | None
    work: _StagedWork


@dataclass(slots=True)
class _SendSlot:
    """Room for one chunk on the host."""

    host: torch.Tensor | None = None
    work: _SharedWork | None = None


class StagedSender:
    """Posts the sends of `channel` in order, those of a device through two chunks of the host."""

    def __init__(self, channel: Channel) -> None:
        self.error: BaseException | None = None
        """What went wrong first; the channel is closed then."""
        self._channel = channel
        self._slots = [_SendSlot() for _ in range(NUM_SLOTS)]
        self._turn = 0
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_open = 0
        name = f"piper_owner: sends to rank {channel.peer} ({next(_NUMBERS)})"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """Whether all that was given to it is posted, so that others may post behind it."""
        with self._lock:
            return self._num_open == 0

    @property
    def staging_bytes(self) -> int:
        """Bytes of the host that it keeps."""
        return sum(slot.host.nbytes for slot in self._slots if slot.host is not None)

    def post(self, tensor: torch.Tensor, streams: Streams | None) -> Work:
        """Send `tensor` behind all before it; as it is on this thread's current stream of `streams` now.

        Does not wait. It must not be written before the work is waited on.
        """
        ready = None if streams is None else streams.current().record()
        work = _StagedWork(streams)
        with self._lock:
            self._num_open += 1
        self._queue.put(_Item(tensor, streams, ready, work))
        return work

    def close(self) -> None:
        """Let the thread end once it has got through what it was given, or failed. Does not wait."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._send(item)
            except BaseException as error:
                self.error = self.error or error
                self._channel.close()  # the peer must not wait for what will not come
                item.work.fail(error)
            finally:
                with self._lock:
                    self._num_open -= 1
                del item  # and with it the tensor

    def _send(self, item: _Item) -> None:
        if item.streams is None or item.ready is None:
            item.work.resolve(_SharedWork(self._channel.post_send(item.tensor)), None)
            return
        streams, slot = item.streams, self._slots[self._turn]
        self._turn = (self._turn + 1) % NUM_SLOTS
        if slot.work is not None:
            slot.work.wait()
        slot.host, chunk = _room(slot.host, item.tensor.numel(), item.tensor.dtype, streams)
        copies = streams.side("send")
        copies.wait_event(item.ready)
        streams.record_stream(item.tensor, copies)
        with streams.on(copies):
            chunk.view_as(item.tensor).copy_(item.tensor, non_blocking=True)
        copied = copies.record()
        copied.synchronize(self._channel.timeout)
        slot.work = _SharedWork(self._channel.post_send(chunk))
        item.work.resolve(slot.work, copied)


@dataclass(slots=True)
class _ReceiveSlot:
    """Room for one chunk on the host and, where it does not go to its place at once, on the device."""

    host: torch.Tensor | None = None
    device: torch.Tensor | None = None
    copied: Event | None = None
    """Where the host's part has been read."""
    consumed: Event | None = None
    """Where the device's part has been read."""


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a message is put on the device, as `streams` has it: `rows`, (num_rows, columns)."""

    streams: Streams
    rows: torch.Tensor


@dataclass(slots=True)
class ReceiveSlots:
    """The two chunks of one line through which messages for a device come, kept from one to the next."""

    streams: Streams
    timeout: timedelta
    slots: list[_ReceiveSlot] = field(default_factory=lambda: [_ReceiveSlot() for _ in range(NUM_SLOTS)])

    @property
    def staging_bytes(self) -> int:
        """Bytes that it keeps, on host and device."""
        parts = (part for slot in self.slots for part in (slot.host, slot.device))
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def stream(self) -> Stream:
        """The stream of the copies to the device."""
        return self.streams.side("receive")

    def host_chunk(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Room on the host for chunk number `index` of a message. Waits until the last one has left it."""
        slot = self.slots[index % NUM_SLOTS]
        if slot.copied is not None:
            slot.copied.synchronize(self.timeout)
        slot.host, chunk = _room(slot.host, _count(shape), dtype, self.streams)
        return chunk.view(shape)

    def land(self, index: int, chunk: torch.Tensor, rows: torch.Tensor) -> Event:
        """Copy what arrived in `host_chunk` to `rows`, which the stream may use; where that is done."""
        slot = self.slots[index % NUM_SLOTS]
        with self.streams.on(self.stream):
            rows.copy_(chunk.view_as(rows), non_blocking=True)
        slot.copied = self.stream.record()
        return slot.copied

    def to_device(self, index: int, chunk: torch.Tensor) -> torch.Tensor:
        """The same, to room on the device, for use on this thread's current stream until `release`."""
        slot, streams = self.slots[index % NUM_SLOTS], self.streams
        if slot.consumed is not None:
            self.stream.wait_event(slot.consumed)
        if slot.device is None or slot.device.nbytes < chunk.nbytes:
            slot.device = streams.buffer(chunk.nbytes, self.stream)
        rows = slot.device[: chunk.nbytes].view(chunk.dtype).view(chunk.shape)
        copied = self.land(index, chunk, rows)
        streams.record_stream(rows, streams.current())
        streams.current().wait_event(copied)
        return rows

    def release(self, index: int) -> None:
        """The chunk of `to_device` is not used any more, beyond what the current stream has to do by now."""
        self.slots[index % NUM_SLOTS].consumed = self.streams.current().record()


def _room(
    kept: torch.Tensor | None, count: int, dtype: torch.dtype, streams: Streams
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kept`, or a larger buffer in its place, and `count` elements of `dtype` in it."""
    num_bytes = count * dtype.itemsize
    if kept is None or kept.nbytes < num_bytes:
        kept = streams.host_buffer(num_bytes)
    return kept, kept[:num_bytes].view(dtype)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
