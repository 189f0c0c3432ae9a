"""Measures on the untied pipeline, and apart from it, what a prediction needs."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from piper_owner.bench.clock import Clock
from piper_owner.bench.predict import Inputs
from piper_owner.dag.nodes import Action, BucketStep, Compute, ComputeKind
from piper_owner.transport.base import Fabric

__all__ = ["ActionTimes", "Calibration", "measured_latency"]

_PING_BYTES: Final = 512
_PINGS: Final = 50
_TABLES: Final = ("embed.weight", "head.weight")
"""The untied pipeline's two tables, by rank."""


class ActionTimes:
    """A StepObserver that keeps how long computing and stepping took in the step at hand."""

    def __init__(self) -> None:
        self._computes: dict[ComputeKind, list[float]] = defaultdict(list)
        self._steps: dict[str, float] = {}

    @contextmanager
    def around(self, action: Action, step: int) -> Iterator[None]:
        """Time `action`."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        match action:
            case Compute(kind=kind):
                self._computes[kind].append(seconds)
            case BucketStep(bucket=bucket):
                self._steps[bucket] = seconds
            case _:
                pass

    def take(self, table: str) -> tuple[float, float, float]:
        """Seconds of a forward and of a backward, each a mean of the step's, and of the step of `table`."""
        forward, backward = (
            statistics.fmean(self._computes[kind]) for kind in (ComputeKind.FORWARD, ComputeKind.BACKWARD)
        )
        found = forward, backward, self._steps[table]
        self._computes.clear()
        return found


class Calibration:
    """The measurements of one rank, of which rank 0 makes the inputs.

    vocab, hidden: of the table that rank 0 looks rows up in.
    """

    def __init__(self, rank: int, vocab: int, hidden: int) -> None:
        self.times = ActionTimes()
        self._rank = rank
        self._table = nn.Embedding(vocab, hidden) if rank == 0 else None
        self._actions: list[tuple[float, float, float]] = []
        self._lookups: list[tuple[float, float]] = []
        self._rows: list[int] = []

    def note_step(self, *, is_timed: bool) -> None:
        """Keep what `times` saw of an untied step. Local."""
        taken = self.times.take(_TABLES[self._rank])
        if is_timed:
            self._actions.append(taken)

    def look_up(self, ids: Sequence[Tensor], *, is_timed: bool) -> None:
        """Time the embedding's backward for a step's microbatches, with all rows and with theirs. Local."""
        if self._table is None:
            return
        rows, places = torch.stack(tuple(ids)).unique(return_inverse=True)
        compact = nn.Embedding(len(rows), self._table.embedding_dim)
        seconds = _lookup_seconds(self._table, ids), _lookup_seconds(compact, places.unbind(0))
        if is_timed:
            self._lookups.append(seconds)
            self._rows.append(len(rows))

    def inputs(self, clock: Clock, rate: float, latency: float) -> Inputs:
        """The medians of both ranks. Collective."""
        mine = [statistics.median(column) for column in zip(*self._actions, strict=True)]
        # The sum over both ranks is the value of the one that has it.
        ranks = [[clock.meet(value if self._rank == rank else 0.0) for value in mine] for rank in range(2)]
        lookups = [statistics.median(column) for column in zip(*self._lookups, strict=True)] or [0.0, 0.0]
        whole, compact = [clock.meet(value) for value in lookups]
        num_rows = clock.meet(statistics.median(self._rows) if self._rows else 0.0)
        return Inputs(
            forward_seconds=(ranks[0][0], ranks[1][0]),
            backward_seconds=(ranks[0][1], ranks[1][1]),
            lookup_seconds=whole,
            rows_lookup_seconds=compact,
            table_step_seconds=(ranks[0][2] + ranks[1][2]) / 2,
            rate_bits_per_s=rate,
            latency_seconds=latency,
            num_rows=round(num_rows),
        )


def _lookup_seconds(table: nn.Embedding, ids: Sequence[Tensor]) -> float:
    """Seconds of the backward of a microbatch, the mean of a step, whose gradients add up."""
    table.weight.grad = None
    total = 0.0
    for each in ids:
        rows = table(each)
        grad = torch.ones_like(rows)
        start = time.perf_counter()
        rows.backward(grad)
        total += time.perf_counter() - start
    table.weight.grad = None
    return total / len(ids)


def measured_latency(fabric: Fabric, clock: Clock) -> float:
    """Seconds that a small message takes, one way: half of the median there and back. Collective."""
    channel = fabric.channel(1 - fabric.rank, "latency")
    ping = torch.zeros(_PING_BYTES, dtype=torch.uint8)
    seconds = []
    clock.meet()
    for _ in range(_PINGS):
        start = time.perf_counter()
        for sender in range(2):
            (channel.post_send(ping) if fabric.rank == sender else channel.post_recv(ping)).wait()
        seconds.append(time.perf_counter() - start)
    channel.close()
    # Rank 0 sees the way there and back; rank 1 also what lies between two pings.
    return clock.meet(statistics.median(seconds) / 2 if fabric.rank == 0 else 0.0)
