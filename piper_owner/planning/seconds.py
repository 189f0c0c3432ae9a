"""The program of a step under each method, and how long a step takes, from the dry run of all ranks. Pure.

What is assumed, but for what the plan is given: a device computes at its `flops` whatever the stage, a
backward takes twice a forward, an optimizer moves its tensors at `memory_bandwidth`, links are full duplex,
have `bandwidth` each way, and a tie's messages do not slow those of the pipeline down. Averages over
pipelines are rings, and waited for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, assert_never

from piper_owner.cost import ID_BYTES
from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.dag.lower import insert_bucket_steps, insert_transfers
from piper_owner.dag.nodes import (
    Across,
    Action,
    BucketStep,
    Collective,
    Compute,
    ComputeKind,
    Sync,
    SyncKind,
    Transfer,
    TransferKind,
)
from piper_owner.dag.pipelines import insert_data_parallel
from piper_owner.ownership import OwnershipPlan, TiePlan
from piper_owner.p2p_nodes import insert_all_reduce, insert_ownership
from piper_owner.planning.config import Method, PlanConfig
from piper_owner.planning.memory import RankMemory, stepped_memory
from piper_owner.planning.shapes import ModelShapes, TiedShape, TiedUse
from piper_owner.planning.streams import StreamTimes, first_part, in_two_parts, stream_times
from piper_owner.schedules import build_dag, place_stages
from piper_owner.simulate import Timeline, simulate

__all__ = [
    "SIMULATED_STEPS",
    "Pipelines",
    "Timing",
    "backward_seconds",
    "forward_seconds",
    "tied_bytes",
    "time_step",
]

SIMULATED_STEPS: Final = 2
"""Steps that are run behind one another: the last one is as long as all that would follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Steps one after another, as all ranks run them; `timeline` has `num_steps` of them.

    step_seconds: from the end of the last but one to the end of the last; of one, from its start.
    """

    step_seconds: float
    timeline: Timeline
    num_steps: int = SIMULATED_STEPS

    @property
    def window(self) -> tuple[float, float]:
        """From when the first rank that does anything begins its last step, for one step."""
        for starts in self.timeline.starts:
            if starts:
                begin = starts[len(starts) // self.num_steps * (self.num_steps - 1)]
                return begin, begin + self.step_seconds
        return 0.0, 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelines:
    """What all methods have in common: the programs but for the ties, and what is kept of each bucket.

    buckets: by name, those of stages without ties, and the copies of ties, each stepped by its rank.
    """

    placement: tuple[int, ...]
    owned: TrainingDAG
    copied: TrainingDAG
    buckets: Mapping[str, RankMemory]

    @classmethod
    def of(cls, model: ModelShapes, config: PlanConfig) -> Pipelines:
        """Those of `model` under `config`. Raises ConfigError where the schedule cannot be."""
        placement = place_stages(config.stages, config.devices, config.placement)
        built = build_dag(
            config.schedule,
            placement=placement,
            num_ranks=config.devices,
            num_microbatches=config.microbatches,
            buckets=[Bucket(name=f"stage{stage}", stages=(stage,)) for stage in range(config.stages)],
            stage_edges=model.edges,
        )
        copies = [Bucket(name=use.name, stages=(use.stage,)) for tied in model.ties for use in _copies(tied)]
        moved = insert_transfers(built)
        kept = {f"stage{i}": stepped_memory(stage.shapes, config) for i, stage in enumerate(model.stages)}
        for tied in model.ties:
            kept |= dict.fromkeys(tied.tie.names, stepped_memory((tied.shape,), config))
        return cls(
            placement=placement,
            owned=insert_bucket_steps(moved),
            copied=insert_bucket_steps(dataclasses.replace(moved, buckets=(*moved.buckets, *copies))),
            buckets=kept,
        )

    def dag(self, method: Method, plan: OwnershipPlan, config: PlanConfig) -> TrainingDAG:
        """The program of a step under `method`, with the syncs that `plan` asks for."""
        match method:
            case Method.NAIVE:
                dag = self.copied
            case Method.ALL_REDUCE:
                dag = insert_all_reduce(self.copied, plan.ties)
            case Method.DENSE | Method.ROWS:
                dag = insert_ownership(self.owned, plan)
            case _:
                assert_never(method)
        return insert_data_parallel(dag, config.pipelines, one_owner=False)


def _copies(tied: TiedShape) -> tuple[TiedUse, ...]:
    """The uses that are copies where nothing makes them one: in one stage they are one Parameter anyhow."""
    return tied.uses if len({use.stage for use in tied.uses}) > 1 else tied.uses[:1]


def forward_seconds(model: ModelShapes, config: PlanConfig) -> tuple[float, ...]:
    """By stage, the seconds of the forward of a microbatch: as given, or its operations over `flops`.

    An element that a token is multiplied with costs two operations; a causal attention looks at half of
    the sequence on average.
    """
    if config.stage_seconds:
        return config.stage_seconds
    tokens = config.microbatch_tokens
    return tuple(
        tokens * (2 * stage.multiplies + stage.attention * config.sequence) / config.flops
        for stage in model.stages
    )


def backward_seconds(model: ModelShapes, config: PlanConfig) -> tuple[float, ...]:
    """By stage, the seconds of the backward of a microbatch: as given, or twice its forward."""
    return config.backward_seconds or tuple(2.0 * each for each in forward_seconds(model, config))


def tied_bytes(kind: SyncKind, tie: TiePlan, peer_has_rows: bool, config: PlanConfig) -> int:
    """Payload bytes of one message of `tie`; headers, 512 bytes each, not counted."""
    row = math.prod(tie.shape[1:]) * config.itemsize
    match kind:
        case SyncKind.SEND_IDS | SyncKind.RECV_IDS:
            return config.num_rows * ID_BYTES
        case SyncKind.SEND_ROWS | SyncKind.RECV_ROWS:
            return config.num_rows * row
        case SyncKind.SEND_GRAD | SyncKind.RECV_GRAD:
            return (config.num_rows if peer_has_rows else tie.shape[0]) * row
        case SyncKind.SEND_WEIGHT | SyncKind.RECV_WEIGHT:
            return tie.shape[0] * row
        case SyncKind.OWNER_STEP:
            return 0
        case _:
            assert_never(kind)


def _step_seconds(kept: RankMemory, config: PlanConfig) -> float:
    """An optimizer's step: weights and gradients are read, weights written, state read and written."""
    state = kept.masters + kept.optimizer
    return (2 * kept.weights + kept.gradients + 2 * state) / config.memory_bandwidth


def _flight(size: int, config: PlanConfig) -> float:
    return config.latency + size / config.bandwidth


def _owner_seconds(tie: TiePlan, config: PlanConfig) -> float:
    """The owner's step, in which it adds each replica's gradient to its own: two are read and one is written.

    Owners of several pipelines average the combined gradient in it.
    """
    kept = stepped_memory((tie.shape,), config)
    added = 3 * kept.gradients * len(tie.replicas) / config.memory_bandwidth
    return _step_seconds(kept, config) + added + _ring_seconds(kept.gradients, config.pipelines, config)


def _durations(
    model: ModelShapes, plan: OwnershipPlan, method: Method, config: PlanConfig, pipelines: Pipelines
) -> Callable[[Action], float]:
    """Seconds of each action, as `simulate` takes them."""
    computes = {
        ComputeKind.FORWARD: forward_seconds(model, config),
        ComputeKind.BACKWARD: backward_seconds(model, config),
    }
    halves = tuple(seconds / 2 for seconds in computes[ComputeKind.BACKWARD])
    each = config.microbatch_tokens * config.itemsize
    moved = {edge: _flight(features * each, config) for edge, features in model.edges.items()}
    ties = {tie.name: tie for tie in plan.ties}
    owner = {name: _owner_seconds(tie, config) for name, tie in ties.items()}
    streams: dict[str, StreamTimes] = {}
    for name, tie in ties.items():
        if tie.copies:
            streams[first_part(name)], streams[name] = stream_times(tie, owner[name], config)
    steps = {name: _step_seconds(kept, config) for name, kept in pipelines.buckets.items()}
    sizes = {name: kept.gradients for name, kept in pipelines.buckets.items()}

    def sync(action: Sync) -> float:
        part = streams.get(action.bucket)
        match action.kind:
            case SyncKind.SEND_IDS | SyncKind.SEND_ROWS:
                return _flight(tied_bytes(action.kind, ties[action.bucket], True, config), config)
            case SyncKind.SEND_GRAD if part is None:
                return _flight(tied_bytes(action.kind, ties[action.bucket], True, config), config)
            case SyncKind.OWNER_STEP:
                return owner[action.bucket] if part is None else part.step
            case SyncKind.SEND_GRAD | SyncKind.SEND_WEIGHT:
                assert part is not None, "only a tie with copies sends weights"
                return part.grad if action.kind is SyncKind.SEND_GRAD else part.weight
            case SyncKind.RECV_IDS | SyncKind.RECV_ROWS | SyncKind.RECV_GRAD | SyncKind.RECV_WEIGHT:
                return 0.0
            case _:
                assert_never(action.kind)

    def duration(action: Action) -> float:
        match action:
            case Compute(kind=kind, stage=stage):
                return computes.get(kind, halves)[stage]
            case Transfer(kind=move, stage=stage, peer_stage=other):
                sends = move in (TransferKind.SEND_ACTIVATION, TransferKind.SEND_INPUT_GRAD)
                return moved[min(stage, other), max(stage, other)] if sends else 0.0
            case BucketStep(bucket=bucket):
                return steps[bucket]
            case Sync():
                return sync(action)
            case Across(bucket=bucket):
                return _ring_seconds(sizes[bucket], config.pipelines, config)
            case Collective(ranks=ranks, bucket=name):
                return _all_reduce_seconds(ties, ranks, name, config)
            case _:
                assert_never(action)

    return duration


def _all_reduce_seconds(
    ties: Mapping[str, TiePlan], ranks: tuple[int, ...], name: str | None, config: PlanConfig
) -> float:
    size = 0 if name is None else math.prod(ties[name].shape) * config.itemsize
    return _ring_seconds(size, len(ranks), config)


def _ring_seconds(size: int, num: int, config: PlanConfig) -> float:
    """An all-reduce in a ring: 2 (num - 1) rounds, in each of which a rank sends a num-th part."""
    return 2 * (num - 1) * (config.latency + size / num / config.bandwidth) if num > 1 and size else 0.0


def time_step(
    dag: TrainingDAG,
    model: ModelShapes,
    plan: OwnershipPlan,
    method: Method,
    config: PlanConfig,
    pipelines: Pipelines,
) -> Timing:
    """Run steps of `dag` behind one another: a rank begins its next step when it has ended one.

    Nothing but messages keeps ranks in step, so what is awaited across the end of a step hides there too.
    With a barrier between them one step stands for all.
    """
    num_steps = 1 if config.barrier else SIMULATED_STEPS
    played = (in_two_parts(program, plan) for program in dag.programs)
    repeated = dataclasses.replace(dag, programs=tuple(program * num_steps for program in played))
    timeline = simulate(repeated, _durations(model, plan, method, config, pipelines))
    before = 0.0
    if num_steps > 1:
        before = max(ends[len(ends) // num_steps * (num_steps - 1) - 1] for ends in timeline.ends if ends)
    return Timing(step_seconds=timeline.makespan - before, timeline=timeline, num_steps=num_steps)
