"""Streams of a CUDA device, or of any other accelerator that torch knows, through its general interface."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import torch

from piper_owner.errors import ConfigError, ExchangeError
from piper_owner.streams.base import Event, Stream, Streams

__all__ = ["AcceleratorStreams", "is_capturing", "refuse_capture"]

_SHORTEST_NAP: Final = 20e-6
_LONGEST_NAP: Final = 1e-3


class _Event(Event):
    def __init__(self, event: torch.Event, where: str) -> None:
        self.event = event
        self._where = where

    def synchronize(self, timeout: timedelta) -> None:
        # torch's own wait for an event knows no timeout.
        deadline = time.monotonic() + timeout.total_seconds()
        nap = _SHORTEST_NAP
        while not self.event.query():
            if time.monotonic() > deadline:
                raise ExchangeError(
                    f"{self._where} did not finish its work within {timeout.total_seconds():g} s; a kernel "
                    "before the exchange hangs, or takes longer than the timeout of assign_owners"
                )
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)


class _Stream(Stream):
    def __init__(self, stream: torch.Stream, name: str) -> None:
        self.stream, self.name = stream, name

    def record(self) -> Event:
        return _Event(self.stream.record_event(), self.name)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, _Event)
        self.stream.wait_event(event.event)


class AcceleratorStreams(Streams):
    """The streams of `device`, which has an index. Needs the device; has run on none so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sides: dict[str, _Stream] = {}
        self._lock = threading.Lock()

    def current(self) -> Stream:
        """The current stream of this thread on the device."""
        return _Stream(torch.accelerator.current_stream(self.device), f"the current stream of {self.device}")

    def side(self, purpose: str) -> Stream:
        """The stream for `purpose`, made at the first call."""
        with self._lock:
            if purpose not in self._sides:
                name = f"the {purpose} stream of {self.device}"
                self._sides[purpose] = _Stream(torch.Stream(self.device), name)
            return self._sides[purpose]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make `stream`, and its device, this thread's current ones."""
        assert isinstance(stream, _Stream)
        # Not `with stream`: that keeps what was current in the stream, which several threads share.
        index, before = (
            torch.accelerator.current_device_index(),
            torch.accelerator.current_stream(self.device),
        )
        torch.accelerator.set_stream(stream.stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(index)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Tell the caching allocator."""
        assert isinstance(stream, _Stream)
        tensor.record_stream(stream.stream)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Pinned memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def refuse_capture(rank: int) -> None:
    """Raise ConfigError, naming `rank`, while a CUDA graph is captured here. Local."""
    if is_capturing():
        raise ConfigError(
            f"rank {rank}: a step, or a part of it that exchanges gradients, was called while a CUDA graph "
            "is captured. It talks to other ranks, which a replay of the graph would not: capture forward "
            "and backward, as torch.cuda.make_graphed_callables does, and step outside the graph"
        )


def is_capturing() -> bool:
    """Whether a CUDA graph is captured from this thread's current stream. Local; cheap without CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
