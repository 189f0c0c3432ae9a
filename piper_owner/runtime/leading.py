"""Leads the ranks of one run through its steps, and begins it again when a rank is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from datetime import timedelta
from itertools import count
from typing import Any, Final

from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.keeping import joined_losses
from piper_owner.executor.recording import RankRecord, Recording
from piper_owner.executor.results import Restart, RunResult, batch_loss, collect_run
from piper_owner.executor.session import StepReport
from piper_owner.executor.snapshots import Holdings, Recovery, plan_recovery
from piper_owner.runtime.crew import Crew
from piper_owner.runtime.failures import Call, RankFailure
from piper_owner.runtime.keeping import Kept
from piper_owner.runtime.progress import OnStep, OnStop, StepProgress
from piper_owner.runtime.restarts import Restarts
from piper_owner.runtime.signals import Stop, Stopped
from piper_owner.transport.base import Board

__all__ = ["RunLeader"]

# Steps that the actors have in hand beyond the one awaited: they need not wait for the driver.
_AHEAD: Final = 2


class RunLeader:
    """One run of `kind`: `run` trains it.

    `kept` is where it is kept (None: nowhere), `snapshot` after how many steps each to take a snapshot
    (None: never), and `recording` what to record of it. `stop` says when the run is to be saved and to end,
    and `on_stop` is told then. After `run`, `replicas_equal` and `records` are as in TrainResult.
    """

    def __init__(
        self,
        crew: Crew,
        kind: RunKind,
        *,
        restarts: Restarts,
        kept: Kept | None = None,
        snapshot: int | None = None,
        recording: Recording | None = None,
        on_step: OnStep | None = None,
        stop: Stop | None = None,
        on_stop: OnStop | None = None,
    ) -> None:
        self.replicas_equal = True
        self.records: tuple[RankRecord, ...] = ()
        self._crew, self._kind, self._config = crew, kind, crew.config
        self._ranks = (0,) if kind is RunKind.REFERENCE else crew.ranks
        self._name = f"the {kind.value} run"
        self._restarts, self._kept, self._recording, self._on_step = restarts, kept, recording, on_step
        self._snapshot = snapshot
        self._stop, self._on_stop = Stop() if stop is None else stop, on_stop
        self._attempts = 0
        self._board: Board = crew.board("")
        # Of the steps that stand: their losses, and what the ranks reported, where that is known.
        self._losses = list(kept.losses()) if kept is not None and kept.keeping.resume else []
        self._reports: dict[int, Mapping[int, StepReport]] = {}
        self._loads = kept is not None and kept.keeping.resume
        self._recovery: Recovery | None = None
        self._secured = 0
        """The last step whose snapshot is known to have counted."""
        self._saved = len(self._losses)
        """The last step that was saved, or is about to be."""

    def run(self) -> RunResult:
        """Train from the first step, or from the checkpoint, to the last one.

        A run that loses a rank begins again from its last snapshot or checkpoint, or else from its first
        step, as often as it may. Raises RunError, CheckpointError for a checkpoint of another run, and
        Stopped when it was to be stopped.
        """
        while True:
            try:
                result = self._attempt()
            except RankFailure as failure:
                if self._stop.number is not None:
                    raise self._stopped(str(failure)) from failure
                self._restart(failure)
            else:
                if self._stop.number is not None:
                    raise self._stopped()
                return result

    def _stopped(self, failure: str = "") -> Stopped:
        """What to raise when the run was to be stopped; after a `failure` the last checkpoint counts."""
        assert self._stop.number is not None
        kept = self._kept
        step = len(kept.losses()) if kept is not None and kept.is_there else 0
        return Stopped(self._stop.number, step=step, is_kept=step > 0, failure=failure)

    def _restart(self, failure: RankFailure) -> None:
        """Get everything ready to begin again. Raises `failure` if that must not be."""
        if not failure.can_restart:
            raise failure
        self._restarts.refuse_more(failure)
        patience = {}
        if self._snapshot is not None:  # who is ended has lost its snapshots
            patience["patience"] = timedelta(seconds=self._config.timeout_seconds + 5)
        holdings = self._crew.release(failure.ranks, **patience)
        self._choose(failure, holdings)
        at_fault = failure.ranks or tuple(rank for rank in self._crew.ranks if rank not in holdings)
        self._restarts.note(
            Restart(
                run=self._kind,
                step=failure.step,
                rank=at_fault[0] if at_fault else None,
                why=str(failure),
                from_step=len(self._losses) if self._recovery is None else self._recovery.step,
            )
        )

    def _choose(self, failure: RankFailure, holdings: Mapping[int, Holdings]) -> None:
        """Where to go on from: the later one of snapshot and checkpoint, or else the beginning."""
        kept, size = self._kept, self._config.num_ranks
        found = plan_recovery(holdings, size) if self._snapshot is not None else None
        losses = kept.losses() if kept is not None and kept.is_there else ()
        if found is None and not losses and self._secured:
            failure.args = (
                f"{failure}; the copy of its snapshot is lost as well, so nothing is left to go on from: "
                "--checkpoint DIR keeps the owner run on disk",
            )
            raise failure
        self._saved = len(losses)
        if found is not None and found.step > len(losses):
            self._recovery, self._loads = found, False
        else:
            self._recovery, self._loads, self._losses = None, bool(losses), list(losses)
        self._secured = 0 if self._recovery is None else self._recovery.step

    def _attempt(self) -> RunResult:
        crew, steps = self._crew, self._config.steps
        # Under a prefix of its own, no attempt meets what another one left in the store.
        prefix = f"run-{self._kind.value}-{self._attempts}"
        self._attempts += 1
        self._board = crew.board(prefix)
        crew.man(len(self._losses) + 1)
        if self._recovery is not None:
            crew.hand_over(self._recovery, len(self._losses) + 1)
        if self._snapshot is not None:
            self._all("start", "keep_snapshots", None if self._recovery is None else self._recovery.step)
        self._all("start", "open", self._kind, prefix)
        if self._recovery is not None:
            # Here there may be fewer losses: ranks go ahead of what the driver has seen.
            found = self._all("return to the snapshot", "restore", self._recovery.step)
            self._losses = list(joined_losses(found[0][0], [share for _, share in found.values()]))
        elif self._kept is not None and self._loads:
            self._all("load", "load", self._kept.path)
        records = self._recording is not None and len(self._losses) < steps
        if records:
            self._all("start of the record", "record", self._recording)
        self._take_steps()
        if self._stop.number is not None:
            raise self._stopped()
        if records:
            taken = self._all("record", "take_record")
            self.records = tuple(taken[rank] for rank in self._ranks)
        if self._kind is RunKind.OWNER:
            self.replicas_equal = all(self._all("check of the replicas", "check").values())
        ends = self._all("end", "finish")
        reports = self._last_reports()
        return collect_run(
            self._config,
            self._kind,
            reports,
            {rank: report for rank, (report, _) in ends.items()},
            {rank: weights for rank, (_, weights) in ends.items()},
            before=self._losses[: steps - len(reports)],
        )

    def _take_steps(self) -> None:
        """Call for every step, save and snapshot that is left, and wait for each in turn.

        When the run is to stop, no further step is called for, and the last one is saved.
        """
        first, last = len(self._losses), self._config.steps
        started: deque[Call] = deque()
        further: deque[Call] = deque()
        for index in count(first):
            if index < last and self._stop.number is not None:
                last = index
                further.extend(self._save_last(index))
            if index < last:
                started.append(self._call(f"step {index + 1} of {self._name}", index, "step", index))
                further.extend(self._keep(index))
            done = index - _AHEAD
            if first <= done < last:
                self._note(done, self._gather(started.popleft(), (*started, *further)))
                while further and further[0].step <= done + 1:
                    self._gather(further.popleft(), (*started, *further))
                self._secure(done + 1)
            if done + 1 >= last:
                break
        while further:
            self._gather(further.popleft(), tuple(further))

    def _save_last(self, step: int) -> Iterator[Call]:
        """Call for a save of `step`, which is to be the last one, unless there is one."""
        if self._on_stop is not None:
            self._on_stop(step)
        if self._kept is not None and step > self._saved:
            yield self._save(self._kept, step)

    def _save(self, kept: Kept, step: int) -> Call:
        self._saved = step
        return self._call(f"checkpoint after step {step}", step - 1, "save", kept.path, kept.facts)

    def _keep(self, index: int) -> Iterator[Call]:
        """Call for what is to be kept of step `index` (from 0)."""
        kept, step, steps = self._kept, index + 1, self._config.steps
        if kept is not None and kept.keeping.is_due(step, steps):
            yield self._save(kept, step)
        if self._snapshot is not None and step % self._snapshot == 0 and step < steps:
            yield self._call(f"snapshot after step {step}", index, "snapshot")

    def _secure(self, step: int) -> None:
        """The snapshot of `step`, if there is one, was taken: so the one before it has arrived everywhere."""
        if self._snapshot is not None and step % self._snapshot == 0:
            self._secured = max(self._secured, step - self._snapshot)

    def _note(self, index: int, reports: Mapping[int, StepReport]) -> None:
        """Step `index` (from 0) is done."""
        self._reports[index] = reports
        self._losses.append(batch_loss(reports))
        if self._on_step is not None:
            self._on_step(_progress(self._config, self._kind, index + 1, reports))

    def _last_reports(self) -> list[Mapping[int, StepReport]]:
        """The reports of the last steps: of as many as are known without a gap."""
        first = self._config.steps
        while first - 1 in self._reports:
            first -= 1
        return [self._reports[index] for index in range(first, self._config.steps)]

    def _all(self, what: str, method: str, *args: object) -> dict[int, Any]:
        return self._gather(self._call(f"{what} of {self._name}", len(self._losses), method, *args))

    def _call(self, what: str, index: int, method: str, *args: object) -> Call:
        step = min(index + 1, self._config.steps)
        return self._crew.call(what, method, *args, step=step, ranks=self._ranks)

    def _gather(self, call: Call, later: tuple[Call, ...] = ()) -> dict[int, Any]:
        return self._crew.gather(self._board, call, later)


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
