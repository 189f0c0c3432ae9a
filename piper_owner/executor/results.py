"""What a command's runs gave: losses, times, bytes and weights, their comparison, and the JSON form."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.recording import RankRecord
from piper_owner.ownership import OwnershipPlan
from piper_owner.transport.messages import BytesSent

if TYPE_CHECKING:
    from piper_owner.executor.session import RankReport, StepReport

__all__ = [
    "Differences",
    "Restart",
    "RunResult",
    "TiedBytes",
    "TrainResult",
    "batch_loss",
    "collect_run",
    "compare",
]

Weights = Mapping[int, Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedBytes:
    """Bytes that the tied parameters take on one rank, by what they are for."""

    weights: int = 0
    grads: int = 0
    optimizer: int = 0

    def to_dict(self) -> dict[str, int]:
        """A JSON-ready `{weights, grads, optimizer}`."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One way of training, measured. Mappings have an entry for every rank, idle ones too.

    `losses` are those of the whole batch, one per step. `seconds_per_step` is the median over the
    steps of the slowest rank's time. `weights` are the parameters at the end, by rank and by
    their name in the full model.
    """

    kind: RunKind
    losses: tuple[float, ...]
    seconds_per_step: float
    tokens_per_second: float
    bytes_sent_per_step: Mapping[int, BytesSent]
    tied_bytes: Mapping[int, TiedBytes]
    optimizer_state_bytes: Mapping[int, int]
    weights: Weights = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, without the weights; a number that is not finite becomes null."""
        return {
            "losses": [_finite(loss) for loss in self.losses],
            "seconds_per_step": self.seconds_per_step,
            "tokens_per_second": self.tokens_per_second,
            "bytes_sent_per_step": {
                str(rank): sent.to_dict() for rank, sent in self.bytes_sent_per_step.items()
            },
            "tied_bytes": {str(rank): tied.to_dict() for rank, tied in self.tied_bytes.items()},
            "optimizer_state_bytes": {str(rank): size for rank, size in self.optimizer_state_bytes.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """The largest absolute differences to the reference, by run; empty without a reference.

    A value is NaN when a run has one where the other has none.
    """

    loss: Mapping[RunKind, float]
    param: Mapping[RunKind, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A run that lost a rank and was begun again.

    `step` is the one that the failure was in (from 1), `rank` the one at fault (None: unknown), `why` what
    happened to it, and `from_step` how many steps of the run stood when it went on.
    """

    run: RunKind
    step: int
    rank: int | None
    why: str
    from_step: int

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {**asdict(self), "run": self.run.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Everything that one command trained. `runs` starts with the owner run.

    `ownership` is the owner run's plan, and `replicas_equal` says whether, at its end, every
    replica held the owner's value bit for bit. `records` are those of the owner run, by rank; none where
    nothing was to be recorded. `restarts` are in the order in which they were made.
    """

    config: TrainConfig
    text: str
    ownership: OwnershipPlan
    runs: Mapping[RunKind, RunResult]
    replicas_equal: bool
    records: tuple[RankRecord, ...] = field(default=(), repr=False, compare=False)
    restarts: tuple[Restart, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What `--json` writes: plain dicts, lists, strings, numbers and null."""
        differences = compare(self.runs, self.ownership)
        return {
            "config": {**self.config.to_dict(), "text": self.text},
            "ties": self.ownership.to_dict()["ties"],
            "runs": {kind.value: run.to_dict() for kind, run in self.runs.items()},
            "max_abs_loss_diff": _by_name(differences.loss),
            "max_abs_param_diff": _by_name(differences.param),
            "replicas_equal": self.replicas_equal,
            "restarts": [restart.to_dict() for restart in self.restarts],
        }


def collect_run(
    config: TrainConfig,
    kind: RunKind,
    steps: Sequence[Mapping[int, StepReport]],
    reports: Mapping[int, RankReport],
    weights: Weights,
    *,
    before: Sequence[float] = (),
) -> RunResult:
    """The result of a run from what its ranks reported, step by step and at the end.

    A batch loss is the sum of its ranks' shares, in ascending order of rank. Bytes are those of
    the last step. Ranks of the config that took no part get zeros. `before` are the losses of the steps
    before a checkpoint from which the run went on; there may be no others.
    """
    ranks = range(config.num_ranks)
    slowest = [max(report.seconds for report in step.values()) for step in steps]
    seconds = statistics.median(slowest) if slowest else 0.0
    idle = tuple(rank for rank in ranks if rank not in reports)
    last = steps[-1] if steps else {}
    return RunResult(
        kind=kind,
        losses=(*before, *(batch_loss(step) for step in steps)),
        seconds_per_step=seconds,
        tokens_per_second=config.tokens_per_step / seconds if seconds > 0 else 0.0,
        bytes_sent_per_step={rank: last[rank].bytes_sent if rank in last else BytesSent() for rank in ranks},
        tied_bytes={
            rank: TiedBytes()
            if rank in idle
            else TiedBytes(
                weights=reports[rank].tied_weights,
                grads=reports[rank].tied_grads,
                optimizer=reports[rank].tied_optimizer,
            )
            for rank in ranks
        },
        optimizer_state_bytes={rank: 0 if rank in idle else reports[rank].optimizer_state for rank in ranks},
        weights=weights,
    )


def batch_loss(step: Mapping[int, StepReport]) -> float:
    """The loss of one step's batch: its ranks' shares, added in ascending order of rank."""
    return math.fsum(step[rank].loss for rank in sorted(step))


def compare(runs: Mapping[RunKind, RunResult], ownership: OwnershipPlan) -> Differences:
    """Each run against the reference run, if there is one.

    Where several ranks hold one parameter, the worst copy counts. A tied parameter is compared
    with the reference's, whichever of the tie's names it has on each side.

    Raises ValueError when a run holds a parameter that the reference does not have.
    """
    reference = runs.get(RunKind.REFERENCE)
    if reference is None:
        return Differences(loss={}, param={})
    tie_of = {name: tie.tie.names for tie in ownership.ties for name in tie.tie.names}
    expected = {name: value for held in reference.weights.values() for name, value in held.items()}
    others = [run for kind, run in runs.items() if kind is not RunKind.REFERENCE]
    return Differences(
        loss={run.kind: _loss_difference(run, reference) for run in others},
        param={run.kind: _param_difference(run, expected, tie_of) for run in others},
    )


def _loss_difference(run: RunResult, reference: RunResult) -> float:
    return _worst(abs(mine - theirs) for mine, theirs in zip(run.losses, reference.losses, strict=True))


def _param_difference(
    run: RunResult, expected: Mapping[str, torch.Tensor], tie_of: Mapping[str, tuple[str, ...]]
) -> float:
    differences = []
    for held in run.weights.values():
        for name, value in held.items():
            names = (name, *tie_of.get(name, ()))
            found = next((expected[other] for other in names if other in expected), None)
            if found is None:
                raise ValueError(
                    f"the reference has no parameter {name!r}, which the {run.kind.value} run has"
                )
            if value.numel():
                differences.append(float((value.double() - found.double()).abs().max()))
    return _worst(differences)


def _worst(values: Iterable[float]) -> float:
    """The largest, 0 for none; NaN if any is (`max` would drop it or not, by its place)."""
    listed = list(values)
    return math.nan if any(math.isnan(value) for value in listed) else max(listed, default=0.0)


def _by_name(values: Mapping[RunKind, float]) -> dict[str, float | None]:
    return {kind.value: _finite(value) for kind, value in values.items()}


def _finite(value: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return value if math.isfinite(value) else None
