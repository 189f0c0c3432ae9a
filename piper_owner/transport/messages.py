"""Checked messages over one channel: a header, then the payload in chunks.

Sends are asynchronous; their handles are kept until `flush`. Receives block, and keep one chunk
in flight while the caller works on the one before. Tensors of the CPU travel from and to where they
lie; those of a device go through two chunks of the host each way (`staging`), and are there for the
current stream when a call returns them. Each end decides that for itself. Where a line has a direct
one beside it, the payloads of the device go over that, and the header, which goes over the channel of
the host as all others do, says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Final

import torch

from piper_owner.errors import ExchangeError, MessageMismatchError
from piper_owner.streams import Event, Stream, Streams, streams_of
from piper_owner.transport.base import Channel, Work
from piper_owner.transport.staging import ReceiveSlots, StagedSender
from piper_owner.transport.wire import HEADER_BYTES, Header, Phase, rows_per_chunk

__all__ = ["BytesSent", "DirectLine", "Incoming", "Line", "Outgoing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesSent:
    """Payload bytes of the tied sync by kind, as their sender counts them; `other` is headers, presence
    and norms."""

    ids: int = 0
    rows: int = 0
    grads: int = 0
    weights: int = 0
    other: int = 0

    def __add__(self, more: BytesSent) -> BytesSent:
        return BytesSent(
            ids=self.ids + more.ids,
            rows=self.rows + more.rows,
            grads=self.grads + more.grads,
            weights=self.weights + more.weights,
            other=self.other + more.other,
        )

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.ids + self.rows + self.grads + self.weights + self.other

    def to_dict(self) -> dict[str, int]:
        """A JSON-ready `{ids, rows, grads, weights, other}`."""
        return asdict(self)


_CPU: Final = torch.device("cpu")

_KIND_OF_PHASE: Final = {
    Phase.GRAD: "grads",
    Phase.WEIGHT: "weights",
    Phase.IDS: "ids",
    Phase.MORE_IDS: "ids",
    Phase.NEXT_IDS: "ids",
    Phase.ROWS: "rows",
}


@dataclass(frozen=True, slots=True)
class DirectLine:
    """A channel of `Fabric.over_devices` beside that of a line, from and to `device`."""

    channel: Channel
    device: torch.device


class Line:
    """Checked messages between this rank and `channel.peer`.

    Not thread-safe. `sent` counts what was posted, and `received` what has arrived, since each was
    last set to `BytesSent()`; `messages` counts the headers among the former.
    """

    def __init__(self, channel: Channel, *, chunk_bytes: int, direct: DirectLine | None = None) -> None:
        self.channel = channel
        self.direct = direct
        self.chunk_bytes = chunk_bytes
        self.sent = BytesSent()
        self.received = BytesSent()
        self.messages = 0
        self.refused: Header | None = None
        """A header that arrived and was not expected, where one of the two is a change of requires_grad."""
        self._awaited: Header | None = None
        self._pending: list[_Tracked] = []
        self._staging: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._sender: StagedSender | None = None
        self._slots: dict[torch.device, ReceiveSlots] = {}

    def send(self, header: Header, tensor: torch.Tensor | None, *, copy: bool = False) -> None:
        """Send `tensor`, or its absence.

        It must not be written before `flush`, unless `copy` is set: then the peer gets the value that
        it has now, at the price of a second tensor until `flush`.

        Raises MessageMismatchError, having sent nothing, when `tensor` is not what `header` announces.
        """
        if tensor is not None and (tensor.dtype, tuple(tensor.shape)) != (header.dtype, header.shape):
            raise MessageMismatchError(
                f"{self._where(header, sending=True)}: the tensor to send has "
                f"{_kind(tensor.dtype, tuple(tensor.shape))}, the message was to have "
                f"{_kind(header.dtype, header.shape)}; every holder of a tie must have the same shape and "
                "dtype, and so must its gradient"
            )
        out = self.open(header, present=tensor is not None, device=None if tensor is None else tensor.device)
        if tensor is None or not tensor.numel():
            return
        rows = tensor.detach().reshape(header.num_rows, -1)
        copy = copy and rows.data_ptr() == tensor.data_ptr()
        for start, stop in out.header.ranges():
            out.put(rows[start:stop], copy=copy)

    def open(
        self,
        header: Header,
        *,
        present: bool = True,
        chunk_rows: int | None = None,
        device: torch.device | None = None,
    ) -> Outgoing:
        """Announce a message whose chunks follow by `Outgoing.put`, in the order of its ranges.

        `chunk_rows` are the rows of each chunk; None: as many as `chunk_bytes` has room for. `device` is
        where they are.
        """
        if chunk_rows is None:
            chunk_rows = rows_per_chunk(header.shape, header.dtype.itemsize, self.chunk_bytes)
        is_direct = present and self.direct is not None and self.direct.device == device
        header = replace(header, present=present, chunk_rows=chunk_rows, is_direct=is_direct)
        self._post(header.encode(), "other", header)
        self.messages += 1
        return Outgoing(self, header)

    def receive(
        self, expected: Header, *, any_tensor: bool = False, or_phase: Phase | None = None
    ) -> Incoming:
        """Wait for the next message and check its header against `expected`.

        `any_tensor` leaves shape and dtype open; `or_phase` is another phase that it may have.

        Raises MessageMismatchError if it is another, after closing the channel, so that the
        sender fails too, unless it is `refused`; PeerTimeoutError or PeerLostError if none comes.
        """
        header = self.await_header(expected, any_tensor=any_tensor, or_phase=or_phase)
        self._awaited = None
        return Incoming(self, header, self._where(expected, sending=False))

    def await_header(
        self, expected: Header, *, any_tensor: bool = False, or_phase: Phase | None = None
    ) -> Header:
        """The header of the next message, which stays the next one to `receive`; raises as that does."""
        where = self._where(expected, sending=False)
        header = self._awaited
        try:
            if header is None:
                raw = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
                with _Context(where):
                    self.wait(self.channel.post_recv(raw))
                self.received += BytesSent(other=raw.nbytes)
                header = Header.decode(raw, where)
            if header.phase is or_phase:
                expected = replace(expected, phase=header.phase)
            header.check(expected, where, any_tensor=any_tensor)
        except MessageMismatchError:
            if header is not None and Phase.FREEZE in (header.phase, expected.phase):
                self.refused = header
            else:
                self.channel.close()
            raise
        self._awaited = header
        return header

    def flush(self, only: Header | None = None) -> None:
        """Wait until the peer has received all that was sent, or all of the phase and subject of `only`.

        In the middle of a step wait for no more than is needed: a message that the peer takes only
        after one of ours of later on would make the two wait for each other.
        """
        chosen = [sent for sent in self._pending if only is None or sent.is_of(only)]
        self._pending = [sent for sent in self._pending if only is not None and not sent.is_of(only)]
        for work in chosen:
            work.wait(self)

    def wait(self, work: Work) -> None:
        """Wait for a post; where it fails because a send has failed before, raise the error of that."""
        try:
            work.wait()
        except ExchangeError as error:
            first = None if self._sender is None else self._sender.error
            if first is None or first is error:
                raise
            raise first from error

    def staging(self, header: Header, device: torch.device = _CPU) -> tuple[torch.Tensor, torch.Tensor]:
        """Two buffers of one chunk each, kept from message to message."""
        columns, key = _columns(header), (header.dtype, device)
        size = min(header.chunk_rows, header.num_rows) * columns
        buffer = self._staging.get(key)
        if buffer is None or buffer.numel() < 2 * size:
            buffer = self._staging[key] = torch.empty(2 * size, dtype=header.dtype, device=device)
        return buffer[:size].view(-1, columns), buffer[size : 2 * size].view(-1, columns)

    @property
    def staging_bytes(self) -> int:
        """Bytes that this end keeps for staging."""
        sent = 0 if self._sender is None else self._sender.staging_bytes
        received = sum(slots.staging_bytes for slots in self._slots.values())
        return sum(buffer.nbytes for buffer in self._staging.values()) + sent + received

    def slots(self, streams: Streams) -> ReceiveSlots:
        """Two chunks of host and device each, through which messages for a device come."""
        found = self._slots.get(streams.device)
        if found is None or found.streams is not streams:
            found = self._slots[streams.device] = ReceiveSlots(streams, self.channel.timeout)
        return found

    @property
    def held(self) -> list[tuple[str, torch.Tensor]]:
        """(kind, tensor) of what it holds: `staging`, and, by their kinds in BytesSent, what was sent and not
        flushed yet."""
        staged = [("staging", buffer) for buffer in self._staging.values()]
        return [*staged, *((sent.kind, sent.tensor) for sent in self._pending)]

    def close(self) -> None:
        """Close the channel; sends that were not flushed may be lost."""
        self._pending.clear()
        self._staging.clear()
        self._slots.clear()
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        self.channel.close()
        if self.direct is not None:
            self.direct.channel.close()

    def drain(self) -> None:
        """Block until the device, too, is done with all that was sent. Raises PeerTimeoutError."""
        if self.direct is not None:
            self.direct.channel.drain()

    def _post(
        self,
        tensor: torch.Tensor,
        kind: str,
        header: Header,
        streams: Streams | None = None,
        direct: DirectLine | None = None,
    ) -> None:
        """Post `tensor`, the host's or one of `streams`, behind all before it, or over `direct`."""
        if streams is not None and self._sender is None:
            self._sender = StagedSender(self.channel)
        with _Context(self._where(header, sending=True)):
            if direct is not None:
                work = direct.channel.post_send(tensor)
            elif self._sender is not None and (streams is not None or not self._sender.is_idle):
                work = self._sender.post(tensor, streams)
            else:
                work = self.channel.post_send(tensor)
        self._pending.append(_Tracked(work, header, self._where(header, sending=True), kind, tensor))
        self.sent += BytesSent(**{kind: tensor.nbytes})

    def _where(self, header: Header, *, sending: bool) -> str:
        ranks = (self.channel.rank, self.channel.peer)
        source, target = ranks if sending else ranks[::-1]
        part = (
            f", microbatch {header.microbatch}"
            if header.phase in (Phase.ACTIVATION, Phase.INPUT_GRAD)
            else ""
        )
        return (
            f"{header.phase.value} of {header.subject!r} from rank {source} to rank {target}, "
            f"step {header.step}{part}"
        )


def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"dtype {str(dtype).removeprefix('torch.')} and shape {shape}"


def _columns(header: Header) -> int:
    size = 1
    for dim in header.shape[1:]:
        size *= dim
    return size


class _Context:
    """Put in front of an exchange error which message it broke."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ExchangeError):
            error.args = (f"{self._where}: {error.args[0]}",)


class _Tracked:
    """A work whose failure says which message it carried."""

    def __init__(self, work: Work, header: Header, where: str, kind: str, tensor: torch.Tensor) -> None:
        self._work, self._header, self._where = work, header, where
        self.kind, self.tensor = kind, tensor

    def is_of(self, other: Header) -> bool:
        """Whether it has the phase and subject of `other`."""
        return (self._header.phase, self._header.subject) == (other.phase, other.subject)

    def wait(self, line: Line) -> None:
        with _Context(self._where):
            line.wait(self._work)


class Outgoing:
    """A message whose chunks are sent one by one."""

    def __init__(self, line: Line, header: Header) -> None:
        self.header = header
        self._line = line

    def put(self, rows: torch.Tensor, *, copy: bool = False) -> None:
        """Send the next chunk; unless it is a `copy`, it must not be written before the line is flushed."""
        kind = _KIND_OF_PHASE.get(self.header.phase, "other")
        direct = self._line.direct if self.header.is_direct else None
        streams = streams_of(rows.device) if direct is None else None
        whole = rows.detach().contiguous() if streams is None else rows.detach()
        if copy and whole.data_ptr() == rows.data_ptr():
            whole = whole.clone()
        self._line._post(whole, kind, self.header, streams, direct)


class Incoming:
    """A message whose header has arrived and is right."""

    def __init__(self, line: Line, header: Header, where: str) -> None:
        self.header = header
        self._line, self._where = line, where
        self._direct = line.direct if header.is_direct else None
        if header.is_direct and self._direct is None:
            line.channel.close()
            raise MessageMismatchError(
                f"{where}: its payload was to come from device to device, and this rank has no such line; "
                "the tied parameters of a rank stay on the device on which assign_owners found them"
            )

    @property
    def present(self) -> bool:
        """Whether a payload follows."""
        return self.header.present

    def chunks(self, device: torch.device = _CPU) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(start row, stop row, rows) of each chunk, as they arrive, on `device`.

        `rows` is a (stop - start, columns) staging buffer of the message's dtype that the caller
        may write to; it is overwritten as soon as the next chunk is asked for.
        """
        streams = streams_of(device)
        if streams is not None and self._direct is None:
            slots = self._line.slots(streams)
            for index, (start, stop, chunk) in enumerate(self._arriving(slots)):
                try:
                    yield start, stop, slots.to_device(index, chunk)
                finally:
                    slots.release(index)
            return
        ranges = list(self.header.ranges())
        if not ranges:
            return
        buffers = self._line.staging(self.header, _CPU if self._direct is None else self._direct.device)
        arriving = self._post(ranges[0], buffers[0])
        for index, (start, stop) in enumerate(ranges):
            rows, work = arriving
            if index + 1 < len(ranges):
                arriving = self._post(ranges[index + 1], buffers[(index + 1) % 2])
            self._finish(work, rows)
            yield start, stop, rows if self._direct is None else rows.to(device)

    def tensor(self, device: torch.device = _CPU) -> torch.Tensor | None:
        """The whole payload in a new tensor on `device`, or None when it is not present."""
        if not self.present:
            return None
        whole = torch.empty(self.header.shape, dtype=self.header.dtype, device=device)
        if streams_of(device) is not None or self._direct is not None:
            self.into(whole)
            return whole
        for _ in self.fill(whole):
            pass
        return whole

    @torch.no_grad()
    def into(self, whole: torch.Tensor) -> None:
        """Write the payload into `whole`, of the header's shape and on any device, chunk by chunk.

        All earlier work of this thread's current stream comes before it, and all further work after
        it, on the device: the host does not wait for either.
        """
        if not whole.numel():
            return
        rows = whole if whole.dim() else whole.view(1)
        streams = streams_of(whole.device)
        if self._direct is not None and whole.device == self._direct.device and whole.is_contiguous():
            for _ in self.fill(rows):
                pass
            torch.autograd.graph.increment_version(whole)  # as every other write to it does
            return
        if streams is None or self._direct is not None:
            for start, stop, chunk in self.chunks(whole.device):
                rows[start:stop].copy_(chunk.view_as(rows[start:stop]))
            return
        stream = self._line.slots(streams).stream
        stream.wait_event(streams.current().record())
        streams.record_stream(whole, stream)
        landed = [event for _, _, _, event in self.land(rows, streams)]
        if landed:
            streams.current().wait_event(landed[-1])

    def land(self, rows: torch.Tensor, streams: Streams) -> Iterator[tuple[int, int, torch.Tensor, Event]]:
        """(start row, stop row, those of `rows`, where they are filled) of each chunk, as they arrive.

        rows: (num_rows, ...), which the receiving stream of `streams` may write.
        """
        slots = self._line.slots(streams)
        if self._direct is not None:
            yield from self._land_directly(rows, streams, slots.stream)
            return
        for index, (start, stop, chunk) in enumerate(self._arriving(slots)):
            yield start, stop, rows[start:stop], slots.land(index, chunk, rows[start:stop])

    def _land_directly(
        self, rows: torch.Tensor, streams: Streams, stream: Stream
    ) -> Iterator[tuple[int, int, torch.Tensor, Event]]:
        with streams.on(stream):
            posted = [
                (start, stop, *self._post((start, stop), rows[start:stop]))
                for start, stop in self.header.ranges()
            ]
        for start, stop, part, work in posted:
            with streams.on(stream):
                self._finish(work, part)
            yield start, stop, part, stream.record()

    def _arriving(self, slots: ReceiveSlots) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(start row, stop row, rows) of each chunk, as it arrives on the host, the next one under way."""
        ranges, columns = list(self.header.ranges()), _columns(self.header)
        posted: list[tuple[torch.Tensor, Work]] = []
        for index, (start, stop) in enumerate(ranges):
            for ahead in range(len(posted), min(index + 2, len(ranges))):
                first, last = ranges[ahead]
                room = slots.host_chunk(ahead, (last - first, columns), self.header.dtype)
                posted.append(self._post((0, last - first), room))
            chunk, work = posted[index]
            self._finish(work, chunk)
            yield start, stop, chunk

    def fill(self, whole: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """As `chunks`, with every receive posted at the first, into `whole`, which has the header's shape.

        The peer's data comes in without anybody waiting for it.
        """
        rows = whole.view(self.header.num_rows, -1) if whole.numel() else whole
        posted = [
            (start, stop, *self._post((start, stop), rows[start:stop]))
            for start, stop in self.header.ranges()
        ]
        for start, stop, part, work in posted:
            self._finish(work, part)
            yield start, stop, part

    def _finish(self, work: Work, rows: torch.Tensor) -> None:
        with _Context(self._where):
            self._line.wait(work)
        kind = _KIND_OF_PHASE.get(self.header.phase, "other")
        self._line.received += BytesSent(**{kind: rows.nbytes})

    def _post(self, span: tuple[int, int], buffer: torch.Tensor) -> tuple[torch.Tensor, Work]:
        rows = buffer[: span[1] - span[0]]
        channel = self._line.channel if self._direct is None else self._direct.channel
        with _Context(self._where):
            return rows, channel.post_recv(rows)
