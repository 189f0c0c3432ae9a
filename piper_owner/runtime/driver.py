"""The driver: one loop that leads the ranks of every run through its steps."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import ray
from numpy.typing import NDArray
from torch._C._distributed_c10d import PrefixStore, TCPStore

from piper_owner.checkpoint import has_checkpoint, read_index
from piper_owner.errors import CheckpointError
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.keeping import check_same_run, kept_losses, run_facts
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

__all__ = ["Keeping", "train"]

# Steps that the actors have in hand beyond the one awaited: they need not wait for the driver.
_AHEAD: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Where the owner run is kept: every `every` steps (None: only at its end), and whether it goes on from
    the checkpoint that is there."""

    path: Path
    every: int | None = None
    resume: bool = False

    def is_due(self, step: int, steps: int) -> bool:
        """Whether to save after `step` of `steps`, counted from 1."""
        return step == steps or (self.every is not None and step % self.every == 0)


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
    keeping: Keeping | None = None,
    host_class: type[RankHost] = RankHost,
) -> TrainResult:
    """Train the owner run and then those of `compare`, each on the same data from the same seed.

    `source` is the model (None: the GPT). `tokens` is int32, one-dimensional; `text` names where they
    come from. `address` is that of a Ray cluster, None for the connected one or else a local one; see
    `Cluster`. `on_step` is called here after every step. `recording` is what to record of the
    owner run, and `keeping` where to keep it. `host_class` is the actor's class.

    Raises InputError before anything starts, and RunError, which carries the error of the rank
    that failed first, after everything that was started here has ended.
    """
    runs = [RunKind.OWNER, *(kind for kind in RunKind if kind in compare and kind is not RunKind.OWNER)]
    source = GPTSource() if source is None else source
    config = resolve_run(config, source)
    plans = {kind: plan_run(config, kind, source) for kind in runs if kind is not RunKind.REFERENCE}
    kept = None if keeping is None else _Kept(keeping, config, tokens)
    timeout = timedelta(seconds=config.timeout_seconds)
    # The driver hosts the store: it outlives every actor, and the port that it was given is free.
    with Cluster(config.num_ranks, address=address, timeout=timeout) as cluster:
        store = open_store(cluster.host, timeout)
        crew = _Crew(config, source, cluster, store, tokens, recording, host_class, kept)
        results = {kind: crew.run(kind, on_step) for kind in runs}
    return TrainResult(
        config=config,
        text=text,
        ownership=plans[RunKind.OWNER].ownership,
        runs=results,
        replicas_equal=crew.replicas_equal,
        records=crew.records,
    )


class _Kept:
    """The checkpoint of one command: what it goes on from, and what is kept with it.

    Raises CheckpointError where a checkpoint is in the way, is missing, or is of another run.
    """

    def __init__(self, keeping: Keeping, config: TrainConfig, tokens: NDArray[np.int32]) -> None:
        self.keeping = keeping
        self.path = str(keeping.path.absolute())
        digest = hashlib.blake2b(np.ascontiguousarray(tokens).data, digest_size=16).hexdigest()
        self.facts = run_facts(config, digest)
        self.losses: tuple[float, ...] = ()
        if keeping.resume:
            index = read_index(keeping.path)
            check_same_run(keeping.path, index.extra, self.facts, config.steps)
            self.losses = kept_losses(index.extra)
        elif has_checkpoint(keeping.path):
            raise CheckpointError(
                f"--checkpoint {keeping.path}: there is a checkpoint already, of step "
                f"{read_index(keeping.path).step}; --resume goes on from it, or give another folder"
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
        kept: _Kept | None,
    ) -> None:
        self._kept = kept
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
        kept = self._kept if kind is RunKind.OWNER else None
        if kept is not None and kept.keeping.resume:
            self._all(f"load of {name}", board, "load", kept.path, ranks=ranks)
        records = kind is RunKind.OWNER and self._recording is not None
        if records:
            self._all(f"start of the record of {name}", board, "record", self._recording, ranks=ranks)
        steps = self._steps(kind, board, ranks, on_step, kept)
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
            before=() if kept is None else kept.losses,
        )

    def _steps(
        self,
        kind: RunKind,
        board: FailureBoard,
        ranks: Sequence[int],
        on_step: OnStep | None,
        kept: _Kept | None,
    ) -> list[Mapping[int, StepReport]]:
        first = 0 if kept is None else len(kept.losses)
        done: list[Mapping[int, StepReport]] = []
        started: deque[Call] = deque()
        saves: dict[int, Call] = {}
        for index in range(first, self._config.steps + _AHEAD):
            if index < self._config.steps:
                what = f"step {index + 1} of the {kind.value} run"
                started.append(self._call(what, "step", index, ranks=ranks))
                if kept is not None and kept.keeping.is_due(index + 1, self._config.steps):
                    what = f"checkpoint after step {index + 1}"
                    saves[index] = self._call(what, "save", kept.path, kept.facts, ranks=ranks)
            if index >= first + _AHEAD:
                done.append(self._gather(board, started.popleft(), (*started, *saves.values())))
                if (saved := saves.pop(index - _AHEAD, None)) is not None:
                    self._gather(board, saved, started)
                if on_step is not None:
                    on_step(_progress(self._config, kind, first + len(done), done[-1]))
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
