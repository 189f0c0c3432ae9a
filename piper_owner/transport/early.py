"""Receives messages before anybody asks for them, so that they travel while the rank computes.

A gloo send moves no payload until the peer has posted the receive, and a posted receive cannot be
asked whether it is done. So a thread per line waits for the header, posts the payload, and hands on
what arrives. It costs a buffer of the message's size, where the message is needed: on the device
for a parameter there, which it fills through two chunks of the host.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from piper_owner.streams import Event, Streams
from piper_owner.transport.messages import Incoming, Line
from piper_owner.transport.wire import Header, Phase

__all__ = ["EarlyIncoming", "EarlyReceiver"]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows that have arrived: at once, or on the device, behind an event."""

    start: int
    stop: int
    rows: torch.Tensor
    landed: Event | None = None


_Arrival = Incoming | _Chunk | BaseException | None


class EarlyIncoming:
    """A message that a thread receives; `header`, `present` and `chunks` wait for it.

    An error of the thread is raised where the message is asked for.
    """

    def __init__(self, streams: Streams | None = None) -> None:
        self.streams = streams
        """Those of the device that the message is for."""
        self._arrived: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._incoming: Incoming | None = None

    @property
    def header(self) -> Header:
        """The header that arrived."""
        return self._announced().header

    @property
    def present(self) -> bool:
        """Whether a payload follows."""
        return self._announced().present

    def chunks(self, device: torch.device | None = None) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(start row, stop row, rows) as in `Incoming.chunks`; the rows are the caller's to write to.

        They are on the device that `EarlyReceiver` was told.
        """
        self._announced()
        while (chunk := self._next()) is not None:
            assert isinstance(chunk, _Chunk)
            if self.streams is not None and chunk.landed is not None:
                self.streams.record_stream(chunk.rows, self.streams.current())
                self.streams.current().wait_event(chunk.landed)
            yield chunk.start, chunk.stop, chunk.rows

    def put(self, item: _Arrival) -> None:
        """For the thread: the header, then each chunk, then None; or an error."""
        self._arrived.put(item)

    def _announced(self) -> Incoming:
        if self._incoming is None:
            first = self._next()
            assert isinstance(first, Incoming)
            self._incoming = first
        return self._incoming

    def _next(self) -> Incoming | _Chunk | None:
        item = self._arrived.get()  # ends: every wait of the thread has a timeout
        if isinstance(item, BaseException):
            self._arrived.put(item)
            raise item
        return item


class EarlyReceiver:
    """Receives the messages `expected` from `line`, in that order, in a thread of its own.

    `streams` has those of the device of each parameter that lies on one, by subject. Until all have
    arrived nothing else may be received from the line; sending is fine.
    """

    def __init__(self, line: Line, expected: Sequence[Header], streams: Mapping[str, Streams]) -> None:
        self._messages = {
            (header.phase, header.subject): EarlyIncoming(streams.get(header.subject)) for header in expected
        }
        self._thread = threading.Thread(
            target=self._receive,
            args=(line, list(expected)),
            name=f"piper_owner: early receives from rank {line.channel.peer}",
            daemon=True,
        )
        self._thread.start()

    def take(self, header: Header) -> EarlyIncoming | None:
        """The message of the phase and subject of `header`, once; None if it was not expected or is taken."""
        return self._messages.pop((header.phase, header.subject), None)

    def peek(self, header: Header) -> EarlyIncoming | None:
        """The same, which stays to be taken."""
        return self._messages.get((header.phase, header.subject))

    def settle(self) -> None:
        """Wait until the line is free for other receives."""
        self._thread.join()  # ends: every wait of the thread has a timeout

    def _receive(self, line: Line, expected: Sequence[Header]) -> None:
        messages = [self._messages[header.phase, header.subject] for header in expected]
        for index, header in enumerate(expected):
            try:
                incoming = line.receive(header)
                messages[index].put(incoming)
                if incoming.present and header.phase is not Phase.FREEZE:
                    for chunk in _chunks_of(incoming, messages[index].streams):
                        messages[index].put(chunk)
                messages[index].put(None)
            except BaseException as error:
                for message in messages[index:]:
                    message.put(error)
                return


def _chunks_of(incoming: Incoming, streams: Streams | None) -> Iterator[_Chunk]:
    """The chunks of a message, each in its part of one buffer."""
    header = incoming.header
    if streams is None:
        whole = torch.empty(header.shape, dtype=header.dtype, device="cpu")
        for start, stop, rows in incoming.fill(whole):
            yield _Chunk(start, stop, rows)
        return
    size = math.prod(header.shape)
    if size:
        buffer = streams.buffer(size * header.dtype.itemsize, streams.side("receive"))
        rows = buffer.view(header.dtype).view(header.num_rows, -1)
        for start, stop, part, landed in incoming.land(rows, streams):
            yield _Chunk(start, stop, part, landed)
