"""Receives messages before anybody asks for them, so that they travel while the rank computes.

A gloo send moves no payload until the peer has posted the receive, and a posted receive cannot be
asked whether it is done. So a thread per line waits for the header, posts the payload, and hands on
what arrives. It costs a buffer of the message's size.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import torch

from piper_owner.transport.messages import Incoming, Line
from piper_owner.transport.wire import Header, Phase

__all__ = ["EarlyIncoming", "EarlyReceiver"]


class EarlyIncoming:
    """A message that a thread receives; `header`, `present` and `chunks` wait for it.

    An error of the thread is raised where the message is asked for.
    """

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[Incoming | tuple[int, int, torch.Tensor] | BaseException | None] = (
            queue.SimpleQueue()
        )
        self._incoming: Incoming | None = None

    @property
    def header(self) -> Header:
        """The header that arrived."""
        return self._announced().header

    @property
    def present(self) -> bool:
        """Whether a payload follows."""
        return self._announced().present

    def chunks(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(start row, stop row, rows) as in `Incoming.chunks`; the rows are the caller's to write to."""
        self._announced()
        while (chunk := self._next()) is not None:
            assert isinstance(chunk, tuple)
            yield chunk

    def put(self, item: Incoming | tuple[int, int, torch.Tensor] | BaseException | None) -> None:
        """For the thread: the header, then each chunk, then None; or an error."""
        self._arrived.put(item)

    def _announced(self) -> Incoming:
        if self._incoming is None:
            first = self._next()
            assert isinstance(first, Incoming)
            self._incoming = first
        return self._incoming

    def _next(self) -> Incoming | tuple[int, int, torch.Tensor] | None:
        item = self._arrived.get()  # ends: every wait of the thread has a timeout
        if isinstance(item, BaseException):
            self._arrived.put(item)
            raise item
        return item


class EarlyReceiver:
    """Receives the messages `expected` from `line`, in that order, in a thread of its own.

    Until all have arrived nothing else may be received from the line; sending is fine.
    """

    def __init__(self, line: Line, expected: Sequence[Header]) -> None:
        self._messages = {(header.phase, header.subject): EarlyIncoming() for header in expected}
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
                    whole = torch.empty(incoming.header.shape, dtype=incoming.header.dtype, device="cpu")
                    for chunk in incoming.fill(whole):
                        messages[index].put(chunk)
                messages[index].put(None)
            except BaseException as error:
                for message in messages[index:]:
                    message.put(error)
                return
