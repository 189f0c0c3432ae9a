"""The ways to keep a model's ties one, side by side on one layout, and which of them to take. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from piper_owner.cost import HEADER_BYTES, Candidate, elect
from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.nodes import SENDS, Across, Collective, Sync, SyncKind
from piper_owner.errors import ConfigError
from piper_owner.ownership import LayoutChoice, OwnerChoice, OwnershipPlan, ParameterUse, plan_ownership
from piper_owner.planning.config import Method, PlanConfig
from piper_owner.planning.memory import RankMemory, activation_bytes, rank_memory
from piper_owner.planning.seconds import Pipelines, Timing, tied_bytes, time_step
from piper_owner.planning.shapes import ModelShapes

__all__ = ["Comparison", "MethodPlan", "Traffic", "compare_methods", "ownership_of", "plan_method"]

_CLOSE: Final = 0.01
_ROUNDING: Final = 1e-9
_MOST_CANDIDATES: Final = 8
_KIND: Final = {
    SyncKind.SEND_IDS: "ids",
    SyncKind.SEND_ROWS: "rows",
    SyncKind.SEND_GRAD: "grads",
    SyncKind.SEND_WEIGHT: "weights",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the tied sync sends in a step from one rank: payload bytes by kind, messages and their headers.

    across: bytes that it sends to average the gradients of everything, ties too, over the pipelines.
    """

    ids: int = 0
    rows: int = 0
    grads: int = 0
    weights: int = 0
    messages: int = 0
    headers: int = 0
    across: int = 0

    @property
    def payload(self) -> int:
        """Bytes of ties in this pipeline, of all kinds, without headers."""
        return self.ids + self.rows + self.grads + self.weights

    def to_dict(self) -> dict[str, int]:
        """A JSON-ready dict of the fields."""
        names = ("ids", "rows", "grads", "weights", "messages", "headers", "across")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodPlan:
    """One method: who owns, its program, its time, its memory, and what each rank sends.

    exposed_seconds: what a step takes longer than that of the same pipeline without any sync.
    """

    method: Method
    ownership: OwnershipPlan
    dag: TrainingDAG
    timing: Timing
    exposed_seconds: float
    memory: Mapping[int, RankMemory]
    traffic: Mapping[int, Traffic]

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return max(memory.total for memory in self.memory.values())

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks that own a tie; none where copies are stepped apart."""
        if self.method in (Method.NAIVE, Method.ALL_REDUCE):
            return ()
        return tuple(sorted({tie.owner for tie in self.ownership.ties}))

    @property
    def messages(self) -> int:
        """Messages of the tied sync in a step, of all ranks; an all-reduce counts once for each rank."""
        return sum(traffic.messages for traffic in self.traffic.values())

    @property
    def busiest(self) -> int:
        """Payload bytes of a step that the rank sends which sends most."""
        return max((traffic.payload for traffic in self.traffic.values()), default=0)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; ranks are string keys."""
        owned = self.method in (Method.DENSE, Method.ROWS)
        return {
            "owners": list(self.owners),
            "ties": self.ownership.to_dict()["ties"] if owned else [],
            "reasons": {tie.name: tie.reason for tie in self.ownership.ties} if owned else {},
            "step_seconds": self.timing.step_seconds,
            "exposed_seconds": self.exposed_seconds,
            "peak_bytes": self.peak,
            "messages": self.messages,
            "memory": {str(rank): memory.to_dict() for rank, memory in self.memory.items()},
            "traffic": {str(rank): traffic.to_dict() for rank, traffic in self.traffic.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All methods that are possible, every owner that was tried, and the advice.

    tried: by method name and owner, the plans among which the owner was elected.
    impossible: why a method is not among `plans`.
    untied_state: bytes of masters and optimizer state of everything but ties, on all ranks of a pipeline.
    """

    model: ModelShapes
    config: PlanConfig
    placement: tuple[int, ...]
    plans: Mapping[Method, MethodPlan]
    tried: Mapping[tuple[Method, int], MethodPlan]
    impossible: Mapping[Method, str]
    advice: Method
    reason: str
    untied_state: int


def ownership_of(
    model: ModelShapes,
    placement: tuple[int, ...],
    config: PlanConfig,
    method: Method,
    owner: OwnerChoice | Mapping[str, OwnerChoice] = "auto",
) -> OwnershipPlan:
    """Who owns and holds the ties of `model`; under NAIVE and ALL_REDUCE only who holds.

    Under ROWS the ties that can keep rows do, which must be one at least.

    Raises ConfigError where the owner holds nothing, or rows are not possible.
    """
    uses = [
        ParameterUse(
            name=use.name,
            rank=placement[use.stage],
            stage=use.stage,
            shape=tied.shape,
            dtype=config.dtype,
            use=use.use,
        )
        for tied in model.ties
        for use in tied.uses
    ]
    ties = [tied.tie for tied in model.ties]
    layout: LayoutChoice = "auto" if method is Method.ROWS else "dense"
    plan = plan_ownership(ties, uses, world_size=config.devices, owner=owner, layout=layout)
    if method is Method.ROWS and not plan.row_pairs:  # raises, and says why
        return plan_ownership(ties, uses, world_size=config.devices, owner=owner, layout="rows")
    return plan


def plan_method(
    model: ModelShapes,
    config: PlanConfig,
    method: Method,
    ownership: OwnershipPlan,
    pipelines: Pipelines,
    *,
    free_seconds: float | None = None,
) -> MethodPlan:
    """Everything about one method; `free_seconds` is a step without any sync (None: this is one)."""
    dag = pipelines.dag(method, ownership, config)
    timing = time_step(dag, model, ownership, method, config, pipelines)
    memory = rank_memory(
        model,
        pipelines.placement,
        ownership,
        method,
        config,
        stages=[pipelines.buckets[f"stage{stage}"] for stage in range(config.stages)],
        activations=activation_bytes(model, dag.programs, config),
    )
    exposed = 0.0 if free_seconds is None else timing.step_seconds - free_seconds
    exposed = exposed if exposed > _ROUNDING * timing.step_seconds else 0.0
    return MethodPlan(
        method=method,
        ownership=ownership,
        dag=dag,
        timing=timing,
        exposed_seconds=exposed,
        memory=memory,
        traffic={rank: _traffic(dag, pipelines, ownership, rank, config) for rank in range(dag.num_ranks)},
    )


def _traffic(
    dag: TrainingDAG, pipelines: Pipelines, plan: OwnershipPlan, rank: int, config: PlanConfig
) -> Traffic:
    sent: Counter[str] = Counter()
    for action in dag.programs[rank]:
        match action:
            case Sync(kind=SyncKind.OWNER_STEP, bucket=name):
                sent["across"] += _ring_bytes(math.prod(plan[name].shape), config.pipelines, config)
            case Sync(kind=kind, bucket=name) if kind in SENDS:
                tie = plan[name]
                sent[_KIND[kind]] += tied_bytes(kind, tie, rank in tie.row_replicas, config)
                sent["messages"] += 1
                sent["headers"] += HEADER_BYTES
            case Collective(ranks=ranks, bucket=str(name)) if len(ranks) > 1:
                sent["grads"] += _ring_bytes(math.prod(plan[name].shape), len(ranks), config)
                sent["messages"] += 1
            case Across(bucket=name):
                elements = pipelines.buckets[name].gradients // config.itemsize
                sent["across"] += _ring_bytes(elements, config.pipelines, config)
            case _:
                pass
    return Traffic(**sent)


def _ring_bytes(elements: int, num: int, config: PlanConfig) -> int:
    """What each of `num` ranks sends for an all-reduce in a ring."""
    return 2 * (num - 1) * elements * config.itemsize // num


def compare_methods(model: ModelShapes, config: PlanConfig, *, owner: OwnerChoice = "auto") -> Comparison:
    """Plan `model` under every method that is possible, and advise one.

    `owner="auto"` elects the owner by what each candidate would cost; another choice is kept.

    Raises ConfigError for stages that the model does not have, or an owner that holds no tie.
    """
    if len(model.stages) != config.stages:
        raise ConfigError(f"--stages {config.stages}: the model is split into {len(model.stages)} stages")
    pipelines = Pipelines.of(model, config)
    held = ownership_of(model, pipelines.placement, config, Method.NAIVE, owner)
    naive = plan_method(model, config, Method.NAIVE, held, pipelines)
    free = naive.timing.step_seconds
    plans = {Method.NAIVE: naive}
    tried: dict[tuple[Method, int], MethodPlan] = {}
    impossible: dict[Method, str] = {}
    if not model.ties:
        impossible |= dict.fromkeys((Method.ALL_REDUCE, Method.ROWS), "the model has no tied parameter")
    elif any(len({use.stage for use in tied.uses}) > 1 for tied in model.ties):
        plans[Method.ALL_REDUCE] = plan_method(
            model, config, Method.ALL_REDUCE, held, pipelines, free_seconds=free
        )
    else:
        impossible[Method.ALL_REDUCE] = "all uses of a tie are in one stage, and there is nothing to reduce"
    for method in (Method.DENSE, Method.ROWS):
        if method in impossible:
            continue
        if method is Method.ROWS and not any(tie.replicas for tie in held.ties):
            impossible[method] = "one device has all uses of a tie, and there is nobody to serve"
            continue
        try:
            candidates = _candidates(model, config, method, owner, pipelines.placement)
        except ConfigError as error:
            impossible[method] = str(error).partition(". ")[0]
            continue
        for rank, plan in candidates.items():
            tried[method, rank] = plan_method(model, config, method, plan, pipelines, free_seconds=free)
        mine = {rank: found for (name, rank), found in tried.items() if name is method}
        plans[method] = _elected(mine, config) if owner == "auto" else next(iter(mine.values()))
    advice, reason = _advise(plans, config)
    return Comparison(
        model=model,
        config=config,
        placement=pipelines.placement,
        plans=plans,
        tried=tried,
        impossible=impossible,
        advice=advice,
        reason=reason,
        untied_state=sum(
            pipelines.buckets[f"stage{stage}"].masters + pipelines.buckets[f"stage{stage}"].optimizer
            for stage in range(config.stages)
        ),
    )


def _candidates(
    model: ModelShapes,
    config: PlanConfig,
    method: Method,
    owner: OwnerChoice,
    placement: tuple[int, ...],
) -> dict[int, OwnershipPlan]:
    """By rank, the plan in which it owns every tie that it can; one plan where the owner is chosen."""
    first = ownership_of(model, placement, config, method, owner)
    found = {first.ties[0].owner if first.ties else 0: first}
    if owner != "auto":
        return found
    for rank in sorted({rank for tie in first.ties for rank in tie.ranks})[:_MOST_CANDIDATES]:
        choice: dict[str, OwnerChoice] = {tie.name: rank for tie in first.ties if rank in tie.ranks}
        try:
            found.setdefault(rank, ownership_of(model, placement, config, method, choice))
        except ConfigError:
            continue  # a rank that only looks rows up cannot serve them
    return found


def _elected(plans: Mapping[int, MethodPlan], config: PlanConfig) -> MethodPlan:
    """Of `plans`, by the rank that owns what it can, that of the rank that `cost.elect` elects."""
    candidates = [
        Candidate(
            rank=rank,
            stage=min(
                (s for tie in plan.ownership.held_by(rank) for s in tie.holder(rank).stages), default=0
            ),
            exposed_seconds=plan.exposed_seconds,
            free_bytes=(config.device_memory or 0) - plan.peak,
        )
        for rank, plan in plans.items()
    ]
    step = max(plan.timing.step_seconds for plan in plans.values())
    election = elect(candidates, step_seconds=step)
    best = plans[election.rank]
    if len(plans) == 1:
        return best
    ties = tuple(
        replace(tie, reason=election.reason) if tie.owner == election.rank else tie
        for tie in best.ownership.ties
    )
    return replace(best, ownership=replace(best.ownership, ties=ties))


def _advise(plans: Mapping[Method, MethodPlan], config: PlanConfig) -> tuple[Method, str]:
    """The method to take: it fits, is within a hundredth of the shortest step, and keeps the least."""
    right = {method: plan for method, plan in plans.items() if method is not Method.NAIVE}
    limit = config.device_memory
    fitting = {m: plan for m, plan in right.items() if limit is None or plan.peak <= limit}
    shortest = min(plan.timing.step_seconds for plan in (fitting or right).values())
    close = [
        plan for plan in (fitting or right).values() if plan.timing.step_seconds <= shortest * (1 + _CLOSE)
    ]
    best = min(close, key=lambda plan: (plan.peak, plan.timing.step_seconds))
    if not best.ownership.ties:
        return best.method, "the model has no tied parameter, and nothing to keep in step"
    if not any(tie.replicas for tie in best.ownership.ties):
        return best.method, "one device holds all uses: one Parameter there, and no message"
    others = [plan for plan in right.values() if plan.method is not best.method]
    words = [_against(best, other) for other in others]
    reason = "; ".join(words) if words else "no other way is possible"
    if limit is not None and not fitting:
        reason = f"nothing fits the {limit / 1e9:.1f} GB of a device; {reason}"
    return best.method, reason


def _against(best: MethodPlan, other: MethodPlan) -> str:
    """What `best` saves over `other`, or costs."""
    saved = other.peak - best.peak
    memory = f"{_size(abs(saved))} {'less' if saved > 0 else 'more'}" if saved else "as much"
    sooner = other.timing.step_seconds - best.timing.step_seconds
    time = f"a step {abs(sooner) * 1e3:.3g} ms {'shorter' if sooner >= 0 else 'longer'}"
    return f"against {other.method.value}: {memory} on the fullest device, {time}"


def _size(count: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} B"
