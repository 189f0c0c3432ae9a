"""Measures the memory of runs on Ray actors: each a few steps, one run after another on the same actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.memory_runs import (
    MemoryResult,
    collect_run,
    plan_method,
    predict_run,
    run_of,
)
from piper_owner.executor.metering import StepMemory
from piper_owner.executor.plan import resolve_run
from piper_owner.executor.session import RankSession
from piper_owner.executor.source import ModelSource
from piper_owner.executor.stream import token_stream
from piper_owner.planning.config import Method
from piper_owner.runtime.actor import RankHost
from piper_owner.runtime.cluster import Cluster
from piper_owner.runtime.crew import Crew
from piper_owner.runtime.store import open_store

__all__ = ["MemoryHost", "OnMeasured", "measure_runs"]

OnMeasured = Callable[[Method, int], None]
"""Called after each step of a run with its method and how many are done."""


class MemoryHost(RankHost):
    """A RankHost whose runs differ in their layout, and are measured."""

    def open_as(self, config: TrainConfig, run: RunKind, prefix: str) -> None:
        """Begin `run` under `config`, which differs from the host's in nothing but the layout. Collective."""
        self.config = config
        self.open(run, prefix)

    def measured_step(self, index: int) -> StepMemory:
        """Train on the batch of step `index` (from 0), and measure. Collective."""
        session = self._live()
        assert isinstance(session, RankSession), "the reference is not measured"
        return session.measured_step(self._stream.batch(index))


def measure_runs(
    config: TrainConfig,
    tokens: NDArray[np.int32],
    methods: Sequence[Method],
    *,
    text: str,
    source: ModelSource,
    address: str | None = None,
    on_step: OnMeasured | None = None,
) -> MemoryResult:
    """Train `config.steps` steps under each of `methods`, and measure every rank's memory.

    The arguments are those of `driver.train`. Raises InputError before anything starts, RunError when a rank
    fails, after everything that was started here has ended.
    """
    config = resolve_run(config, source)
    plans = {method: plan_method(config, method, source) for method in methods}
    stream = token_stream(config, tokens)
    predicted = {method: predict_run(plan, stream, source) for method, plan in plans.items()}
    timeout = timedelta(seconds=config.timeout_seconds)
    with Cluster(config.num_ranks, address=address, timeout=timeout) as cluster:
        store = open_store(cluster.host, timeout)
        crew = Crew(config, source, cluster, store, tokens, MemoryHost)
        crew.man(1)
        runs = {}
        for method, plan in plans.items():
            prefix, name = f"run-{method.value}", f"the {method.value} run"
            board = crew.board(prefix)
            changed, kind = run_of(config, method)
            crew.all(f"start of {name}", board, "open_as", changed, kind, prefix, step=1)
            steps: dict[int, list[StepMemory]] = {rank: [] for rank in crew.ranks}
            for index in range(config.steps):
                what = f"step {index + 1} of {name}"
                done = crew.all(what, board, "measured_step", index, step=index + 1)
                for rank, found in steps.items():
                    found.append(done[rank])
                if on_step is not None:
                    on_step(method, index + 1)
            crew.all(f"end of {name}", board, "close", step=config.steps)
            runs[method] = collect_run(plan, predicted[method], list(steps.values()))
    return MemoryResult(config=config, where="ray", text=text, runs=runs)
