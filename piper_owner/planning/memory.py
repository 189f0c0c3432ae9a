"""Bytes that each rank keeps for a model, by what they are for. Pure.

Weights, gradients, masters and optimizer state are those of the runtime to the byte: its gradients are all
there when the first of its buckets steps. Staging is what the sync holds beside them at most; rows are the
compact tables of replicas that keep no copy. Activations are an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, assert_never

from piper_owner.cost import ID_BYTES, rows_per_chunk, table_capacity
from piper_owner.dag.nodes import Action, Compute, ComputeKind
from piper_owner.ownership import Layout, OwnershipPlan, TiePlan
from piper_owner.planning.config import Method, Optimizer, PlanConfig, Transfer
from piper_owner.planning.shapes import ModelShapes, Shape, StageShapes, count

__all__ = [
    "KINDS",
    "RankMemory",
    "activation_bytes",
    "rank_memory",
    "state_bytes",
    "stepped_memory",
    "tie_memory",
]

_STEP_BYTES: Final = 4
_WIDE_BYTES: Final = 4
_ID_BYTES_HERE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank, by kind."""

    weights: int = 0
    gradients: int = 0
    masters: int = 0
    optimizer: int = 0
    rows: int = 0
    staging: int = 0
    activations: int = 0

    def __add__(self, more: RankMemory) -> RankMemory:
        return RankMemory(**{kind: getattr(self, kind) + getattr(more, kind) for kind in KINDS})

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(getattr(self, kind) for kind in KINDS)

    def to_dict(self) -> dict[str, int]:
        """A JSON-ready dict of the kinds, and their `total`."""
        return {**{kind: getattr(self, kind) for kind in KINDS}, "total": self.total}


KINDS: Final = tuple(field.name for field in fields(RankMemory))


def state_bytes(shapes: Iterable[Shape], optimizer: Optimizer, itemsize: int) -> int:
    """Bytes of the state of `torch.optim`'s optimizer for tensors of `shapes`, after a step.

    Adam and AdamW: two moments in the shape and dtype of what is stepped, and a step counter of 4 bytes
    for each tensor; SGD with momentum: one moment; Adafactor: the counter, and a row and a column of
    moments for each matrix, or the moments of all elements of a tensor of fewer dimensions.
    """
    total = 0
    for shape in shapes:
        size = math.prod(shape)
        match optimizer:
            case Optimizer.ADAMW | Optimizer.ADAM:
                total += 2 * size * itemsize + _STEP_BYTES
            case Optimizer.SGD:
                total += size * itemsize
            case Optimizer.ADAFACTOR:
                factored = (size // shape[-1] + size // shape[-2]) if len(shape) > 1 else size
                total += factored * itemsize + _STEP_BYTES
            case _:
                assert_never(optimizer)
    return total


def stepped_memory(shapes: Sequence[Shape], config: PlanConfig) -> RankMemory:
    """What a rank keeps for tensors that it steps."""
    size = count(shapes)
    return RankMemory(
        weights=size * config.itemsize,
        gradients=size * config.itemsize,
        masters=size * config.master_bytes,
        optimizer=state_bytes(shapes, config.optimizer, config.state_itemsize),
    )


def tie_memory(tie: TiePlan, rank: int, config: PlanConfig) -> RankMemory:
    """What holder `rank` keeps for a tie that has one owner."""
    holder, size = tie.holder(rank), math.prod(tie.shape) * config.itemsize
    columns = math.prod(tie.shape[1:])
    row_chunks = 2 * min(_chunk_bytes(tie.shape, config), config.num_rows * columns * config.itemsize)
    if holder.layout is Layout.ROWS:
        capacity = table_capacity(config.num_rows)
        table = capacity * columns * config.itemsize
        # The rows as they come in, their gradient on its way, ids on theirs, and which row is where.
        staging = row_chunks + config.num_rows * (columns * config.itemsize + ID_BYTES + 3 * _ID_BYTES_HERE)
        staging += 2 * capacity * _ID_BYTES_HERE
        return RankMemory(rows=table, gradients=table, staging=staging)
    chunks = 2 * _chunk_bytes(tie.shape, config)
    if rank != tie.owner:
        # An early gradient leaves as a copy: others on the rank may still scale what it shares memory with.
        early = size if config.transfer is Transfer.EARLY else 0
        return RankMemory(weights=size, gradients=size, staging=early + chunks)
    staging = 0
    if tie.copies:
        early = len(tie.copies) * size
        staging += early if config.transfer is Transfer.EARLY else len(tie.copies) * chunks
    if tie.row_replicas:
        # Rows on their way out, their gradient that comes in and then is whole, and whose they are.
        each = row_chunks + config.num_rows * (2 * columns * config.itemsize + 2 * _ID_BYTES_HERE)
        staging += len(tie.row_replicas) * each
    if tie.replicas and not config.streams:
        staging += math.prod(tie.shape) * max(_WIDE_BYTES, config.state_itemsize)
    return stepped_memory((tie.shape,), config) + RankMemory(staging=staging)


def _chunk_bytes(shape: Shape, config: PlanConfig) -> int:
    rows = min(rows_per_chunk(shape, config.itemsize, config.chunk_bytes), shape[0])
    return rows * math.prod(shape[1:]) * config.itemsize


def _copies_memory(
    model: ModelShapes, placement: Sequence[int], rank: int, method: Method, config: PlanConfig
) -> RankMemory:
    """What a rank keeps for the copies of ties that it steps itself, one for each stage that uses one."""
    memory = RankMemory()
    for tied in model.ties:
        stages = {use.stage for use in tied.uses}
        here = [stage for stage in stages if placement[stage] == rank]
        memory += stepped_memory((tied.shape,) * len(here), config)
        if method is Method.ALL_REDUCE and here and len(stages) > 1:
            flat = (math.prod(tied.shape) + 1) * config.itemsize
            memory += RankMemory(staging=flat)
    return memory


def rank_memory(
    model: ModelShapes,
    placement: Sequence[int],
    plan: OwnershipPlan,
    method: Method,
    config: PlanConfig,
    *,
    stages: Sequence[RankMemory],
    activations: Mapping[int, int],
) -> dict[int, RankMemory]:
    """By rank, what it keeps under `method`; `activations` as `activation_bytes` gives them.

    `stages` is what is kept of each stage but for ties (`stepped_memory`). `plan` says who owns, and is not
    looked at under NAIVE and ALL_REDUCE.
    """
    found = {rank: RankMemory(activations=activations.get(rank, 0)) for rank in range(plan.world_size)}
    for stage, rank in enumerate(placement):
        found[rank] += stages[stage]
    owned = method in (Method.DENSE, Method.ROWS)
    holding = {rank for tied in model.ties for rank in (placement[use.stage] for use in tied.uses)}
    for rank in sorted(holding):
        if not owned:
            found[rank] += _copies_memory(model, placement, rank, method, config)
            continue
        for tie in plan.held_by(rank):
            found[rank] += tie_memory(tie, rank, config)
    return found


def activation_bytes(
    model: ModelShapes, programs: Sequence[Sequence[Action]], config: PlanConfig
) -> dict[int, int]:
    """By rank, the most bytes of activations that wait for their backward at once.

    A microbatch of a stage waits from its forward to the end of its backward, in the order of the rank's
    program.
    """
    entering = [0] * len(model.stages)
    for (_, late), features in model.edges.items():
        entering[late] += features * config.itemsize
    pairs = zip(model.stages, entering, strict=True)
    bytes_of = [_stage_bytes(stage, came_in or _ID_BYTES_HERE, config) for stage, came_in in pairs]
    most = {}
    for rank, program in enumerate(programs):
        now = peak = 0
        for action in program:
            if isinstance(action, Compute):
                match action.kind:
                    case ComputeKind.FORWARD:
                        now += bytes_of[action.stage]
                        peak = max(peak, now)
                    case ComputeKind.BACKWARD | ComputeKind.BACKWARD_WEIGHT:
                        now -= bytes_of[action.stage]
                    case ComputeKind.BACKWARD_INPUT:
                        pass
                    case _:
                        assert_never(action.kind)
        most[rank] = peak
    return most


def _stage_bytes(stage: StageShapes, entering: int, config: PlanConfig) -> int:
    """Bytes that one microbatch leaves in a stage: what its layers save, and what came in."""
    wide = max(_WIDE_BYTES, config.itemsize)
    each = entering + stage.saved * config.itemsize + stage.saved_wide * wide
    return each * config.microbatch_tokens
