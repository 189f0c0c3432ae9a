"""Times work on a device: by its events on a GPU, by the clock on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

__all__ = ["copy_rate", "median_seconds"]


def _seconds(device: torch.device, work: Callable[[], object], repeats: int) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - start) / repeats
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start_event.record()
    for _ in range(repeats):
        work()
    end_event.record()
    torch.cuda.synchronize(device)
    return float(start_event.elapsed_time(end_event)) / 1000 / repeats


def median_seconds(
    device: torch.device, works: Sequence[Callable[[], object]], *, rounds: int, repeats: int = 1
) -> list[float]:
    """The median of `rounds` of each of `works`, in turn, after one that does not count.

    Each round is the mean of `repeats` runs one behind the other.
    """
    for work in works:
        work()
    times = [[_seconds(device, work, repeats) for work in works] for _ in range(rounds)]
    return [statistics.median(each) for each in zip(*times, strict=True)]


def copy_rate(device: torch.device, num_bytes: int, *, rounds: int) -> float:
    """Bytes per second that a copy of `num_bytes` on `device` reads and writes, together."""
    source = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    (seconds,) = median_seconds(device, [lambda: target.copy_(source)], rounds=rounds)
    return 2 * source.nbytes / seconds
