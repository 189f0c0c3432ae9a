"""The driver: one loop that leads the ranks of every run through its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import numpy as np
import ray
from numpy.typing import NDArray
from torch._C._distributed_c10d import PrefixStore, TCPStore

from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.plan import plan_run, resolve_run
from piper_owner.executor.recording import RankRecord, Recording
from piper_owner.executor.results import RunResult, TrainResult, batch_loss, collect_run
from piper_owner.executor.session import StepReport
from piper_owner.executor.source import GPTSource, ModelSource
from piper_owner.runtime.actor import Meeting, RankHost
from piper_owner.runtime.cluster import Cluster
from piper_owner.runtime.failures import Call, gather
from piper_owner.runtime.progress import OnStep, StepProgress
from piper_owner.runtime.store import open_store
from piper_owner.transport.gloo import FailureBoard

__all__ = ["train"]

# Steps that the actors have in hand beyond the one awaited: they need not wait for the driver.
_AHEAD: Final = 2


def train(
    config: TrainConfig,
    tokens: NDArray[np.int32],
    *,
    text: str,
    compare: Sequence[RunKind] = (),
    source: ModelSource | None = None,
    address: str | None = None,
    on_step: OnStep | None = None,
    recording: Recording | None = None,
    host_class: type[RankHost] = RankHost,
) -> TrainResult:
    """Train the owner run and then those of `compare`, each on the same data from the same seed.

    `source` is the model (None: the GPT). `tokens` is int32, one-dimensional; `text` names where they
    come from. `address` is that of a Ray cluster, None for the connected one or else a local one; see
    `Cluster`. `on_step` is called here after every step. `recording` is what to record of the
    owner run. `host_class` is the actor's class.

    Raises InputError before anything starts, and RunError, which carries the error of the rank
    that failed first, after everything that was started here has ended.
    """
    runs = [RunKind.OWNER, *(kind for kind in RunKind if kind in compare and kind is not RunKind.OWNER)]
    source = GPTSource() if source is None else source
    config = resolve_run(config, source)
    plans = {kind: plan_run(config, kind, source) for kind in runs if kind is not RunKind.REFERENCE}
    timeout = timedelta(seconds=config.timeout_seconds)
    # The driver hosts the store: it outlives every actor, and the port that it was given is free.
    with Cluster(config.num_ranks, address=address, timeout=timeout) as cluster:
        store = open_store(cluster.host, timeout)
        crew = _Crew(config, source, cluster, store, tokens, recording, host_class)
        results = {kind: crew.run(kind, on_step) for kind in runs}
    return TrainResult(
        config=config,
        text=text,
        ownership=plans[RunKind.OWNER].ownership,
        runs=results,
        replicas_equal=crew.replicas_equal,
        records=crew.records,
    )


class _Crew:
    """The actors of one command."""

    def __init__(
        self,
        config: TrainConfig,
        source: ModelSource,
        cluster: Cluster,
        store: TCPStore,
        tokens: NDArray[np.int32],
        recording: Recording | None,
        host_class: type[RankHost],
    ) -> None:
        self.replicas_equal = False
        self.records: tuple[RankRecord, ...] = ()
        self._recording = recording
        self._config = config
        self._store = store
        self._pids: dict[int, int] = {}
        meeting = Meeting(host=cluster.host, port=store.port, is_local=cluster.is_local)
        shared = ray.put(tokens)
        self._actors = {
            rank: cluster.start(host_class, rank, rank, config, shared, meeting, source)
            for rank in range(config.num_ranks)
        }
        # A wait of ours must outlast a rank's own, whose error names the cause.
        self._timeout = timedelta(seconds=2 * config.timeout_seconds + 60)
        self._pids = self._all("start of the actors", FailureBoard(store), "pid")

    def run(self, kind: RunKind, on_step: OnStep | None) -> RunResult:
        """Train one run from its first step to its last."""
        # Under a prefix of its own, no run meets what another one left in the store.
        prefix = f"run-{kind.value}"
        board = FailureBoard(PrefixStore(prefix, self._store))
        ranks = (0,) if kind is RunKind.REFERENCE else tuple(self._actors)
        name = f"the {kind.value} run"
        self._all(f"start of {name}", board, "open", kind, prefix, ranks=ranks)
        records = kind is RunKind.OWNER and self._recording is not None
        if records:
            self._all(f"start of the record of {name}", board, "record", self._recording, ranks=ranks)
        steps = self._steps(kind, board, ranks, on_step)
        if records:
            taken = self._all(f"record of {name}", board, "take_record", ranks=ranks)
            self.records = tuple(taken[rank] for rank in ranks)
        if kind is RunKind.OWNER:
            checks = self._all(f"check of the replicas of {name}", board, "check", ranks=ranks)
            self.replicas_equal = all(checks.values())
        ends = self._all(f"end of {name}", board, "finish", ranks=ranks)
        return collect_run(
            self._config,
            kind,
            steps,
            {rank: report for rank, (report, _) in ends.items()},
            {rank: weights for rank, (_, weights) in ends.items()},
        )

    def _steps(
        self, kind: RunKind, board: FailureBoard, ranks: Sequence[int], on_step: OnStep | None
    ) -> list[Mapping[int, StepReport]]:
        done: list[Mapping[int, StepReport]] = []
        started: deque[Call] = deque()
        for index in range(self._config.steps + _AHEAD):
            if index < self._config.steps:
                what = f"step {index + 1} of the {kind.value} run"
                started.append(self._call(what, "step", index, ranks=ranks))
            if index >= _AHEAD:
                done.append(self._gather(board, started.popleft(), started))
                if on_step is not None:
                    on_step(_progress(self._config, kind, len(done), done[-1]))
        return done

    def _all(
        self, what: str, board: FailureBoard, method: str, *args: object, ranks: Sequence[int] | None = None
    ) -> dict[int, Any]:
        return self._gather(board, self._call(what, method, *args, ranks=ranks))

    def _call(self, what: str, method: str, *args: object, ranks: Sequence[int] | None) -> Call:
        chosen = self._actors if ranks is None else ranks
        made = {rank: getattr(self._actors[rank], method).remote(*args) for rank in chosen}
        return Call(what=what, references=made)

    def _gather(self, board: FailureBoard, call: Call, later: Iterable[Call] = ()) -> dict[int, Any]:
        return gather(call, tuple(later), timeout=self._timeout, board=board, pids=self._pids)


def _progress(
    config: TrainConfig, kind: RunKind, step: int, reports: Mapping[int, StepReport]
) -> StepProgress:
    seconds = max(report.seconds for report in reports.values())
    return StepProgress(
        run=kind,
        step=step,
        loss=batch_loss(reports),
        tokens_per_second=config.tokens_per_step / seconds if seconds > 0 else 0.0,
        tied_bytes=sum(report.bytes_sent.total for report in reports.values()),
    )
