"""What a device's streams and events are to the exchange.

Work on one stream runs in the order in which it was started; work on two runs at the same time, and
the host does not wait for either. An event marks a place on a stream: another stream waits there for
it without the host (`Stream.wait_event`), and the host waits for it with `Event.synchronize`.
"""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager
from datetime import timedelta

import torch

__all__ = ["Event", "Stream", "Streams"]


class Event(abc.ABC):
    """A place on a stream, behind all work that was started there before."""

    @abc.abstractmethod
    def synchronize(self, timeout: timedelta) -> None:
        """Block the host until the work before it is done. Raises ExchangeError after `timeout`."""


class Stream(abc.ABC):
    """An order of work on one device. `name` stands in error messages."""

    name: str

    @abc.abstractmethod
    def record(self) -> Event:
        """An event behind all work so far. Does not wait."""

    @abc.abstractmethod
    def wait_event(self, event: Event) -> None:
        """Let all work from here on wait for `event`, on the device. The host goes on."""


class Streams(abc.ABC):
    """The streams of one device. May be used from several threads; the current stream is a thread's own."""

    device: torch.device

    @abc.abstractmethod
    def current(self) -> Stream:
        """The stream on which this thread's work is started."""

    @abc.abstractmethod
    def side(self, purpose: str) -> Stream:
        """A stream beside the current one; always the same one for one `purpose`."""

    @abc.abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Make `stream` this thread's current one for a while."""

    @abc.abstractmethod
    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the memory of `tensor`, once it is freed, until what `stream` has to do by then is done.

        For a tensor that was made on another stream; call it before `stream` uses it.
        """

    @abc.abstractmethod
    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """A new uint8 tensor in memory of the host that copies to and from the device go straight to."""

    def buffer(self, num_bytes: int, stream: Stream) -> torch.Tensor:
        """A new uint8 tensor on the device, made on `stream`."""
        with self.on(stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
