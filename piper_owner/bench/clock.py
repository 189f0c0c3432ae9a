"""A common clock of two ranks, and a counter of what passes between them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import torch

from piper_owner.errors import ConfigError
from piper_owner.transport.base import Fabric

__all__ = ["Clock", "InterfaceCounter", "measured_rate"]

_PROBE_BYTES: Final = 64 * 2**20
_PROBES: Final = 5


class Clock:
    """Lets both ranks start together, and tells when both are done."""

    def __init__(self, fabric: Fabric) -> None:
        self._group = fabric.group((0, 1), "clock")

    def meet(self, value: float = 0.0) -> float:
        """Wait for the other rank; the sum of both ranks' `value`. Collective."""
        mark = torch.tensor([value], dtype=torch.float64)
        self._group.all_reduce(mark)
        return float(mark)

    def start(self) -> float:
        """The time at which both ranks are here. Collective."""
        self.meet()
        return time.perf_counter()

    def since(self, start: float) -> float:
        """Seconds from `start` until both ranks are here. Collective."""
        self.meet()
        return time.perf_counter() - start


class InterfaceCounter:
    """Reads how much a network interface of this host has sent and received.

    The kernel counts a packet that it hands over whole, for the interface to cut, with one header.
    """

    def __init__(self, interface: str) -> None:
        self._files = [
            Path("/sys/class/net", interface, "statistics", f"{way}_bytes") for way in ("tx", "rx")
        ]
        for file in self._files:
            if not file.exists():
                raise ConfigError(f"interface {interface!r}: {file} is missing; only Linux counts there")

    def read(self) -> tuple[int, int]:
        """Bytes sent and received since the interface is there."""
        sent, received = (int(file.read_text(encoding="ascii")) for file in self._files)
        return sent, received


def measured_rate(fabric: Fabric, clock: Clock) -> float:
    """Bits per second of one large message from rank 0 to rank 1, the median of some. Collective."""
    channel = fabric.channel(1 - fabric.rank, "rate")
    probe = torch.zeros(_PROBE_BYTES, dtype=torch.uint8)
    seconds = []
    for _ in range(_PROBES):
        start = clock.start()
        (channel.post_send(probe) if fabric.rank == 0 else channel.post_recv(probe)).wait()
        seconds.append(clock.since(start))
    channel.close()
    return 8 * _PROBE_BYTES / sorted(seconds)[_PROBES // 2]
