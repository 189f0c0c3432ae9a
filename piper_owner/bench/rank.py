"""One of the two ranks of a benchmark: every way has its turn in every round."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._distributed_c10d import PrefixStore, Store

from piper_owner.bench.calibrate import Calibration, measured_latency
from piper_owner.bench.clock import Clock, InterfaceCounter, measured_rate
from piper_owner.bench.config import BenchConfig, Host, StepWay, Way
from piper_owner.bench.predict import Inputs, planned_exposed
from piper_owner.bench.result import BenchResult, Exposed, WayFigures
from piper_owner.bench.ways import Lap, make_way
from piper_owner.data.batches import TokenStream
from piper_owner.executor.config import RunKind
from piper_owner.executor.plan import plan_run
from piper_owner.executor.session import RankSession
from piper_owner.executor.source import GPTSource
from piper_owner.ownership import LayoutChoice, OwnerChoice
from piper_owner.transport import GlooFabric

__all__ = ["run_rank"]

T = TypeVar("T")

_WARM_UP: Final = 2
"""Rounds that are not timed: they make optimizer state, staging buffers and connections."""

_RUNS: Final[dict[StepWay, tuple[RunKind, LayoutChoice, OwnerChoice]]] = {
    StepWay.UNTIED: (RunKind.NAIVE, "dense", "auto"),
    StepWay.ALLREDUCE: (RunKind.ALLREDUCE, "dense", "auto"),
    StepWay.DENSE: (RunKind.OWNER, "dense", "first"),
    StepWay.DENSE_LAST: (RunKind.OWNER, "dense", "last"),
    StepWay.ROWS: (RunKind.OWNER, "rows", "last"),
}


def run_rank(
    config: BenchConfig,
    host: Host,
    rank: int,
    store: Store,
    tokens: NDArray[np.int32],
    step_tokens: NDArray[np.int32],
) -> BenchResult:
    """Measure everything on rank `rank` of two; the result of rank 0 counts. Collective.

    tokens, step_tokens: of the table's vocabulary, and of the training steps' (not read where these
    are left out). `store` is shared by both ranks.
    """
    torch.set_num_threads(1)
    bench = _Rank(config, host, rank, store)
    rate = measured_rate(bench.fabric("rate"), bench.clock) if config.rate is None else config.rate
    ids = torch.from_numpy(tokens[: config.tokens].astype(np.int64))
    return BenchResult(
        rate_bits_per_s=rate,
        table=(config.vocab, config.hidden),
        tokens=ids.numel(),
        unique_rows=ids.unique().numel(),
        ways=bench.ways(ids, rate),
        **({} if config.skip_steps else bench.steps(step_tokens)),
    )


class _Rank:
    def __init__(self, config: BenchConfig, host: Host, rank: int, store: Store) -> None:
        self._config, self._host, self._rank, self._store = config, host, rank, store
        self._counter = None if host.interface is None else InterfaceCounter(host.interface)
        self.clock = Clock(self.fabric("clock"))

    def fabric(self, name: str) -> GlooFabric:
        """A fabric of its own: its messages meet no others."""
        timeout = timedelta(seconds=self._config.timeout_seconds)
        store = PrefixStore(name, self._store)
        return GlooFabric(store, self._rank, 2, timeout=timeout, hostname=self._host.address)

    def ways(self, ids: torch.Tensor, rate: float) -> dict[Way, WayFigures]:
        """Medians of every way."""
        config = self._config
        generator = torch.Generator().manual_seed(1)
        grad = torch.empty(config.vocab, config.hidden).uniform_(-1e-3, 1e-3, generator=generator)
        runners = {way: make_way(way, config, self.fabric(way.value), ids, grad) for way in Way}
        laps: dict[Way, list[Lap]] = {way: [] for way in Way}
        for is_timed, way in self._turns(list(Way)):
            runners[way].prepare()
            self.clock.meet()
            before = self._counted()
            lap = runners[way].run(self.clock)
            after = self._counted()
            if before is not None and after is not None:
                sent, received = after[0] - before[0], after[1] - before[1]
                lap = Lap(total=lap.total, step=lap.step, sent=sent, received=received)
            if is_timed:
                laps[way].append(lap)
        return {way: _figures(laps[way], rate, is_duplex=runners[way].is_duplex) for way in Way}

    def steps(self, tokens: NDArray[np.int32]) -> dict[str, Any]:
        """The fields of a result that are about whole training steps."""
        config = self._config
        sessions = {}
        for way, (kind, layout, owner) in _RUNS.items():
            fabric = self.fabric(f"step {way.value}")
            sessions[way] = RankSession(config.train_config(layout, owner), kind, fabric)
        calibration = Calibration(self._rank, config.steps_vocab, config.steps_hidden)
        sessions[StepWay.UNTIED].observe(calibration.times)
        stream = TokenStream(
            tokens,
            microbatches=config.steps_microbatches,
            microbatch_size=config.steps_microbatch_size,
            sequence_length=config.steps_sequence_length,
        )
        seconds: dict[StepWay, list[float]] = {way: [] for way in StepWay}
        taken = dict.fromkeys(StepWay, 0)
        for is_timed, way in self._turns(list(StepWay)):
            batch = stream.batch(taken[way])
            taken[way] += 1
            start = self.clock.start()
            sessions[way].train_step(batch)
            elapsed = self.clock.since(start)
            if is_timed:
                seconds[way].append(elapsed)
            if way is StepWay.UNTIED:
                calibration.note_step(is_timed=is_timed)
                calibration.look_up(torch.from_numpy(batch.ids).unbind(0), is_timed=is_timed)
        for session in sessions.values():
            session.close()
        rate = measured_rate(self.fabric("step rate"), self.clock)
        latency = measured_latency(self.fabric("latency"), self.clock)
        inputs = calibration.inputs(self.clock, rate, latency)
        return {
            "steps": {way: statistics.median(times) for way, times in seconds.items()},
            "exposed": _exposed(config, inputs, seconds),
            "inputs": inputs,
            "auto": _elected(config),
        }

    def _turns(self, ways: Sequence[T]) -> Iterator[tuple[bool, T]]:
        """(whether it counts, way): all of them in every round, another one first each time."""
        for number in range(_WARM_UP + self._config.rounds):
            first = number % len(ways)
            for way in (*ways[first:], *ways[:first]):
                yield number >= _WARM_UP, way

    def _counted(self) -> tuple[int, int] | None:
        return None if self._counter is None else self._counter.read()


def _exposed(
    config: BenchConfig, inputs: Inputs, seconds: Mapping[StepWay, Sequence[float]]
) -> dict[StepWay, Exposed]:
    """Beside the prediction, the median of what a step took longer than the untied one of its round."""
    predicted = planned_exposed(config, inputs)
    untied = seconds[StepWay.UNTIED]
    longer = {way: [a - b for a, b in zip(seconds[way], untied, strict=True)] for way in predicted}
    return {
        way: Exposed(
            predicted_seconds=predicted[way],
            measured_seconds=statistics.median(longer[way]),
            lowest_seconds=min(longer[way]),
            highest_seconds=max(longer[way]),
        )
        for way in predicted
    }


def _elected(config: BenchConfig) -> StepWay:
    """The way that `layout="auto"` and `owner="auto"` take for this model."""
    (tie,) = plan_run(config.train_config("auto"), RunKind.OWNER, GPTSource()).ownership.ties
    if tie.row_replicas:
        return StepWay.ROWS
    return StepWay.DENSE if tie.owner == 0 else StepWay.DENSE_LAST


def _figures(laps: Sequence[Lap], rate: float, *, is_duplex: bool) -> WayFigures:
    larger = [max(lap.sent, lap.received) if is_duplex else lap.sent + lap.received for lap in laps]
    return WayFigures(
        sync_seconds=statistics.median(lap.total - lap.step for lap in laps),
        step_seconds=statistics.median(lap.step for lap in laps),
        total_seconds=statistics.median(lap.total for lap in laps),
        bytes=round(statistics.median(lap.sent + lap.received for lap in laps)),
        limit_seconds=8 * statistics.median(larger) / rate,
    )
