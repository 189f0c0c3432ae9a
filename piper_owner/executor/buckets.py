"""The parameters of one rank, by bucket, and the optimizers that step them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.errors import TieError
from piper_owner.ownership import OwnershipPlan
from piper_owner.stepping import state_bytes, tensor_bytes

__all__ = ["LocalBucket", "OptimizerFactory", "local_buckets"]

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of one bucket from its parameters (never an empty list)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBucket:
    """A bucket that this rank holds; `optimizer` is None for a replica, or without parameters."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    optimizer: torch.optim.Optimizer | None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the bucket's parameters."""
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def grad_bytes(self) -> int:
        """Bytes of the gradients that the bucket's parameters have now."""
        return sum(tensor_bytes(p.grad) for p in self.parameters)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state, now."""
        if self.optimizer is None:
            return 0
        return sum(state_bytes(self.optimizer, parameter) for parameter in self.parameters)

    def step(self) -> None:
        """Step the bucket and drop its gradients."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def local_buckets(
    dag: TrainingDAG,
    plan: OwnershipPlan,
    rank: int,
    stages: Mapping[int, nn.Module],
    make_optimizer: OptimizerFactory,
    *,
    steps_ties: bool = True,
) -> dict[str, LocalBucket]:
    """The buckets of `rank` by name. Ties must have been united before.

    A plain bucket holds the parameter that bears its name, or else all parameters of its stage
    that no other bucket holds; no parameter is in two buckets. Parameters without requires_grad are
    in none. `steps_ties`: whether the owners of ties are in this pipeline.

    Raises TieError when one Parameter is in two stages of the rank but in no tie.
    """
    named = {
        stage: {name: p for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
        for stage, module in stages.items()
    }
    taken: set[int] = set()
    buckets: dict[str, LocalBucket] = {}

    def add(bucket: Bucket, parameters: Iterable[nn.Parameter], *, steps: bool) -> None:
        unique = tuple({id(p): p for p in parameters}.values())
        taken.update(map(id, unique))
        optimizer = make_optimizer(list(unique)) if steps and unique else None
        buckets[bucket.name] = LocalBucket(name=bucket.name, parameters=unique, optimizer=optimizer)

    mine = [bucket for bucket in dag.buckets if rank in dag.holders_of(bucket)]
    for bucket in mine:
        if bucket.owner is not None:
            names = plan[bucket.name].tie.names
            found = [held[name] for held in named.values() for name in names if name in held]
            add(bucket, found, steps=steps_ties and bucket.owner == rank)
        elif bucket.name in named[bucket.stages[0]]:
            named_so = named[bucket.stages[0]][bucket.name]
            # One that the stage has by two names is in the bucket of the first of them.
            add(bucket, [named_so] if id(named_so) not in taken else [], steps=True)
    for bucket in mine:
        if bucket.name not in buckets:
            rest = [p for p in named[bucket.stages[0]].values() if id(p) not in taken]
            add(bucket, rest, steps=True)
    _check_stages(named, rank, taken)
    return buckets


def _check_stages(named: Mapping[int, Mapping[str, nn.Parameter]], rank: int, taken: set[int]) -> None:
    for stage, held in named.items():
        for name, parameter in held.items():
            if id(parameter) not in taken:
                raise TieError(
                    f"{name!r} of stage {stage} on rank {rank} is in no bucket of the TrainingDAG, so "
                    "nothing would step it; give each stage a bucket"
                )
