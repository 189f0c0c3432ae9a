"""Runs whose memory is measured: which there are, what is predicted for them, and what they gave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from piper_owner.cost import table_capacity
from piper_owner.data.batches import TokenStream
from piper_owner.errors import ConfigError
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.metering import StepMemory
from piper_owner.executor.plan import RunPlan, plan_run
from piper_owner.executor.rehearsal import rehearse_peak
from piper_owner.executor.source import ModelSource
from piper_owner.memory import MemoryUse, predict
from piper_owner.ownership import LayoutChoice, OwnershipPlan, TiePlan
from piper_owner.planning.config import Method

__all__ = [
    "EXACT",
    "MemoryResult",
    "MethodMemory",
    "Predicted",
    "RankMeasured",
    "collect_run",
    "plan_method",
    "predict_run",
    "run_of",
]

EXACT: Final = ("weights", "gradients", "masters", "optimizer")
"""Kinds that are predicted to the byte; so are rows and other."""

_RUNS: Final[dict[Method, tuple[RunKind, LayoutChoice]]] = {
    Method.NAIVE: (RunKind.NAIVE, "dense"),
    Method.ALL_REDUCE: (RunKind.ALLREDUCE, "dense"),
    Method.DENSE: (RunKind.OWNER, "dense"),
    Method.ROWS: (RunKind.OWNER, "rows"),
}
_COPIES: Final = {RunKind.NAIVE: Method.NAIVE.value, RunKind.ALLREDUCE: Method.ALL_REDUCE.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Of one rank in the steps after the first: what it keeps, and the most of all tensors at one time."""

    use: MemoryUse
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasured:
    """One rank of one run. `first` is its first step; `later` has of each kind the most of those after it.

    `predicted_peak` is the predicted peak of a step that is not the first.
    """

    predicted: MemoryUse
    predicted_peak: int
    first: StepMemory
    later: StepMemory

    @property
    def difference(self) -> dict[str, int]:
        """By kind, in total and of the peak, how much more was measured than predicted."""
        measured = {**self.later.use.to_dict(), "peak": self.later.peak}
        predicted = {**self.predicted.to_dict(), "peak": self.predicted_peak}
        return {kind: measured[kind] - predicted[kind] for kind in measured}

    @property
    def peak_error(self) -> float:
        """By which share of the measured peak the predicted one is off."""
        return abs(self.difference["peak"]) / max(self.later.peak, 1)

    @property
    def is_exact(self) -> bool:
        """Whether the kinds that are predicted to the byte are so."""
        difference = self.difference
        return not any(difference[kind] for kind in (*EXACT, "rows", "other"))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "predicted": {**self.predicted.to_dict(), "peak": self.predicted_peak},
            "measured": {**self.later.use.to_dict(), "peak": self.later.peak},
            "difference": self.difference,
            "first_step": {**self.first.use.to_dict(), "peak": self.first.peak},
            "process": self.later.process.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodMemory:
    """One run: `ranks` in order, and who owns and holds under `ownership`."""

    method: Method
    ownership: OwnershipPlan
    ranks: tuple[RankMeasured, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "ties": self.ownership.to_dict()["ties"],
            "ranks": {str(rank): each.to_dict() for rank, each in enumerate(self.ranks)},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryResult:
    """Everything that one command measured. `where`: ray or torchrun; `text`: where the tokens come from."""

    config: TrainConfig
    where: str
    text: str
    runs: Mapping[Method, MethodMemory]

    @property
    def is_exact(self) -> bool:
        """Whether every rank of every run keeps what was predicted, to the byte."""
        return all(rank.is_exact for run in self.runs.values() for rank in run.ranks)

    @property
    def peak_error(self) -> float:
        """The largest `peak_error` of all ranks of all runs."""
        return max(rank.peak_error for run in self.runs.values() for rank in run.ranks)

    def to_json(self) -> dict[str, Any]:
        """What `--json` writes."""
        return {
            "config": {**self.config.to_dict(), "text": self.text},
            "where": self.where,
            "exact": self.is_exact,
            "peak_error": self.peak_error,
            "runs": {method.value: run.to_dict() for method, run in self.runs.items()},
        }


def run_of(config: TrainConfig, method: Method) -> tuple[TrainConfig, RunKind]:
    """The config and the kind of the run that is trained under `method`."""
    kind, layout = _RUNS[method]
    return replace(config, layout=layout), kind


def plan_method(config: TrainConfig, method: Method, source: ModelSource) -> RunPlan:
    """Plan the run under `method`. Pure. Raises ConfigError where it is not possible, or makes no sense."""
    changed, kind = run_of(config, method)
    plan = plan_run(changed, kind, source)
    if plan.config.dp > 1:
        raise ConfigError(
            f"--dp {plan.config.dp}: the memory of one pipeline is measured; give no program of several"
        )
    return plan


def collect_run(
    plan: RunPlan, predicted: Sequence[Predicted], steps: Sequence[Sequence[StepMemory]]
) -> MethodMemory:
    """What the run gave, beside its prediction; both by rank, and of each rank all steps, two at least."""
    ranks = tuple(_collect_rank(*each) for each in zip(predicted, steps, strict=True))
    return MethodMemory(method=_method_of(plan), ownership=plan.ownership, ranks=ranks)


def _collect_rank(predicted: Predicted, steps: Sequence[StepMemory]) -> RankMeasured:
    first, *others = steps
    use = others[0].use
    for each in others[1:]:
        use |= each.use
    later = StepMemory(use=use, peak=max(each.peak for each in others), process=others[-1].process)
    return RankMeasured(predicted=predicted.use, predicted_peak=predicted.peak, first=first, later=later)


def predict_run(
    plan: RunPlan, stream: TokenStream, source: ModelSource, *, master_dtype: torch.dtype | None = None
) -> tuple[Predicted, ...]:
    """By rank, what it will keep in the steps after the first. Pure: shapes, the plan, and ids of batches.

    master_dtype: that of an OwnerOptimizer that steps in place of the run's own optimizers.
    """
    split = source.split(plan.config, device="meta")
    found = []
    for rank in range(plan.dag.num_ranks):
        stages = [split.stages[stage] for stage in plan.dag.stages_of(rank)]
        num_rows, table_rows = _rows(plan, rank, stages, stream)
        use = predict(
            stages,
            plan.ownership,
            rank,
            optimizer=plan.config.optimizer,
            master_dtype=master_dtype,
            method=_COPIES.get(plan.run),
            num_rows=num_rows,
            table_rows=table_rows,
            chunk_bytes=plan.config.chunk_bytes,
        )
        rows = {"num_rows": num_rows, "table_rows": table_rows}
        peak = rehearse_peak(plan, split, rank, **rows, master_dtype=master_dtype)
        found.append(Predicted(use=use, peak=peak))
    return tuple(found)


def _method_of(plan: RunPlan) -> Method:
    return next(m for m, (kind, layout) in _RUNS.items() if (kind, layout) == (plan.run, plan.config.layout))


def _rows(plan: RunPlan, rank: int, stages: Sequence[nn.Module], stream: TokenStream) -> tuple[int, int]:
    """The most rows that a step after the first looks up, and that the compact table of `rank` has then."""
    batches = [np.unique(stream.batch(step).ids) for step in range(plan.config.steps)]
    most = max(len(ids) for ids in batches[1:])
    rows = [tie for tie in plan.ownership.held_by(rank) if rank in tie.row_replicas]
    capacities = [_capacities(batches, _paddings(stages, tie)) for tie in rows]
    return most, max((max(each[1:]) for each in capacities), default=0)


def _capacities(batches: Iterable[Any], paddings: set[int]) -> list[int]:
    """Step by step, the rows of a compact table: it stays as large as it was where the step's rows fit."""
    capacities: list[int] = []
    before = 0
    for ids in batches:
        needed = len(paddings) + len(set(ids.tolist()) - paddings)
        before = table_capacity(needed, num_ids=len(ids), before=before)
        capacities.append(before)
    return capacities


def _paddings(stages: Sequence[nn.Module], tie: TiePlan) -> set[int]:
    """Ids that have a row of the table whether or not they are looked up."""
    return {
        module.padding_idx
        for stage in stages
        for name, module in stage.named_modules()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None
        if f"{name}.weight" in tie.tie.names
    }
