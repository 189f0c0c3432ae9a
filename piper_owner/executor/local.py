"""All ranks of a run as threads of this process, over the in-memory transport.

The same sessions, DAGs and exchange as on Ray, without starting a process: for tests, and for a
quick look. Python runs one thread at a time, so its seconds say little.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

from torch import Tensor

from piper_owner.data.batches import TokenStream
from piper_owner.errors import ExchangeError
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.plan import plan_run, resolve_run
from piper_owner.executor.recording import RankRecord, Recording
from piper_owner.executor.reference import ReferenceSession
from piper_owner.executor.results import RunResult, TrainResult, collect_run
from piper_owner.executor.session import RankReport, RankSession, StepReport
from piper_owner.executor.source import GPTSource, ModelSource
from piper_owner.transport.base import Fabric
from piper_owner.transport.memory import MemoryNetwork

__all__ = ["run_threads", "train_in_process"]

T = TypeVar("T")


class _Rank(threading.Thread, Generic[T]):
    """One rank's thread; keeps what its function returned or raised."""

    def __init__(self, rank: int, work: Callable[[Fabric], T], fabric: Fabric) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self.rank, self._work, self._fabric = rank, work, fabric
        self.results: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do the work. The error of a thread would otherwise be printed and forgotten."""
        try:
            self.results.append(self._work(self._fabric))
        except BaseException as error:  # raised again by run_threads, in the caller's thread
            self.error = error


def run_threads(world_size: int, work: Callable[[Fabric], T], *, timeout: timedelta) -> list[T]:
    """Call `work(fabric)` for every rank, each in a thread; the results by rank.

    `timeout` bounds every wait of one rank for another. If ranks fail, one error is raised: that
    of the rank that failed for a reason of its own, or else of the lowest one.
    """
    network = MemoryNetwork(world_size, timeout=timeout)
    ranks = [_Rank(rank, work, network.fabric(rank)) for rank in range(world_size)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    failed = [thread.error for thread in ranks if thread.error is not None]
    own = [error for error in failed if not isinstance(error, ExchangeError)]
    if failed:
        raise (own or failed)[0]
    return [thread.results[0] for thread in ranks]


@dataclass(frozen=True, slots=True)
class _Trained:
    """What one rank has to show at the end."""

    steps: list[StepReport]
    equal: bool
    report: RankReport
    weights: dict[str, Tensor]
    record: RankRecord | None


def train_in_process(
    config: TrainConfig,
    stream: TokenStream,
    *,
    compare: tuple[RunKind, ...] = (),
    source: ModelSource | None = None,
    text: str = "",
    recording: Recording | None = None,
) -> TrainResult:
    """Train the owner run and those of `compare` on `stream`; what `piper-owner train` returns.

    `source` is the model (None: the GPT). `recording` is what to record of the owner run; torch profiles
    one thread of a process at a time, so it is not to ask for a profile of several ranks.
    """
    source = GPTSource() if source is None else source
    config = resolve_run(config, source)
    owner, equal, records = _train(config, RunKind.OWNER, stream, source, recording)
    runs = {RunKind.OWNER: owner}
    for kind in compare:
        if kind is RunKind.REFERENCE:
            runs[kind] = _train_reference(config, stream, source)
        else:
            runs[kind], _, _ = _train(config, kind, stream, source, None)
    plan = plan_run(config, RunKind.OWNER, source)
    return TrainResult(
        config=config,
        text=text,
        ownership=plan.ownership,
        runs=runs,
        replicas_equal=equal,
        records=records,
    )


def _train(
    config: TrainConfig, run: RunKind, stream: TokenStream, source: ModelSource, recording: Recording | None
) -> tuple[RunResult, bool, tuple[RankRecord, ...]]:
    def work(fabric: Fabric) -> _Trained:
        session = RankSession(config, run, fabric, source)
        if recording is not None:
            session.record(recording)
        steps = [session.train_step(stream.batch(step)) for step in range(config.steps)]
        record = None if recording is None else session.take_record()
        equal = session.check()
        session.close()
        return _Trained(steps, equal, session.report(), session.weights(), record)

    ranks = run_threads(config.num_ranks, work, timeout=timedelta(seconds=config.timeout_seconds))
    steps = [{rank: done.steps[step] for rank, done in enumerate(ranks)} for step in range(config.steps)]
    reports = {rank: done.report for rank, done in enumerate(ranks)}
    weights = {rank: done.weights for rank, done in enumerate(ranks)}
    records = tuple(done.record for done in ranks if done.record is not None)
    return collect_run(config, run, steps, reports, weights), all(done.equal for done in ranks), records


def _train_reference(config: TrainConfig, stream: TokenStream, source: ModelSource) -> RunResult:
    session = ReferenceSession(config, source)
    steps = [{0: session.train_step(stream.batch(step))} for step in range(config.steps)]
    return collect_run(config, RunKind.REFERENCE, steps, {0: session.report()}, {0: session.weights()})
