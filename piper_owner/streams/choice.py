"""Which streams a device has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from piper_owner.streams.accelerator import AcceleratorStreams
from piper_owner.streams.base import Streams
from piper_owner.streams.checked import CheckedStreams

__all__ = ["checked_streams", "streams_of"]

_FOUND: dict[torch.device, Streams] = {}
_LOCK = threading.Lock()
_FORCED = threading.local()


def streams_of(device: torch.device) -> Streams | None:
    """The streams of `device`; None for the CPU, where work is done when a call returns. Local."""
    if device.type in ("cpu", "meta"):
        forced: CheckedStreams | None = getattr(_FORCED, "streams", None)
        return forced if device.type == "cpu" else None
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    with _LOCK:
        if device not in _FOUND:
            _FOUND[device] = AcceleratorStreams(device)
        return _FOUND[device]


@contextmanager
def checked_streams() -> Iterator[CheckedStreams]:
    """Treat the CPU, on this thread, as a device with streams, and check the order of all work on it.

    For tests: tied parameters on the CPU then go the way of those on a device.
    """
    before = getattr(_FORCED, "streams", None)
    streams = _FORCED.streams = CheckedStreams()
    try:
        with streams.checking():
            yield streams
    finally:
        _FORCED.streams = before
