"""Plan one run: who owns what, and every rank's program, before anything is started."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import assert_never

import torch

from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.dag.text import format_dag
from piper_owner.errors import ConfigError
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.models.gpt import GPTConfig, build_model, build_stage
from piper_owner.ownership import OwnershipPlan, ParameterUse, Tie, plan_ownership
from piper_owner.p2p_nodes import executable, executable_copies
from piper_owner.schedules import Placement, Schedule, build_dag, place_stages
from piper_owner.simulate import Timeline, simulate
from piper_owner.ties import describe_uses, find_ties

__all__ = ["RunPlan", "gpt_config", "plan_run", "torch_dtype"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run that has passed every rule and the dry run."""

    config: TrainConfig
    run: RunKind
    ownership: OwnershipPlan
    dag: TrainingDAG
    timeline: Timeline

    @property
    def digest(self) -> str:
        """32 hex digits, equal on two ranks exactly when they planned the same with the same options."""
        text = f"{self.config!r}\n{self.run.value}\n{self.ownership.digest}\n{format_dag(self.dag)}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def torch_dtype(config: TrainConfig) -> torch.dtype:
    """The torch dtype of the run's parameters and activations."""
    return {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}[config.dtype]


def gpt_config(config: TrainConfig) -> GPTConfig:
    """The model that the run trains."""
    return GPTConfig(
        vocab_size=config.vocab,
        hidden=config.hidden,
        layers=config.layers,
        heads=config.heads,
        context=config.sequence_length,
    )


def plan_run(config: TrainConfig, run: RunKind) -> RunPlan:
    """Plan `run`: the model on the meta device, its ties, owners, and one program a rank.

    Pure: the same on every rank, no process and no memory for weights. The reference has no plan.

    Raises ConfigError for an owner that holds no copy, and for copies where there is one stage.
    """
    placement = place_stages(config.stages, config.devices, Placement(config.placement))
    ties, uses = _ties_and_uses(config, placement)
    ownership = plan_ownership(
        ties,
        uses,
        world_size=config.devices,
        owner=config.owner,
        layout=config.layout if run is RunKind.OWNER else "dense",
    )
    clip = config.clip is not None
    match run:
        case RunKind.OWNER:
            built = _build(config, placement, _stage_buckets(config))
            dag = executable(built, ownership, clip=clip)
        case RunKind.NAIVE | RunKind.ALLREDUCE:
            if config.stages == 1:
                raise ConfigError(
                    f"--compare {run.value} with --stages 1: embedding and head are one parameter there; "
                    "use at least 2 stages"
                )
            names = {name for tie in ties for name in tie.names}
            copies = tuple(Bucket(name=use.name, stages=(use.stage,)) for use in uses if use.name in names)
            built = _build(config, placement, (*_stage_buckets(config), *copies))
            dag = executable_copies(built, ownership, all_reduce=run is RunKind.ALLREDUCE, clip=clip)
        case RunKind.REFERENCE:
            raise ConfigError("the reference is one process: it has no pipeline to plan")
        case _:
            assert_never(run)
    return RunPlan(config=config, run=run, ownership=ownership, dag=dag, timeline=simulate(dag))


def _ties_and_uses(
    config: TrainConfig, placement: tuple[int, ...]
) -> tuple[tuple[Tie, ...], tuple[ParameterUse, ...]]:
    model, dtype = gpt_config(config), torch_dtype(config)
    ties = find_ties(build_model(model, dtype=dtype, device="meta"))
    uses: list[ParameterUse] = []
    for stage, rank in enumerate(placement):
        module = build_stage(model, stage, config.stages, dtype=dtype, device="meta")
        uses.extend(describe_uses({stage: module}, rank=rank))
    return ties, tuple(uses)


def _stage_buckets(config: TrainConfig) -> tuple[Bucket, ...]:
    return tuple(Bucket(name=f"stage{stage}", stages=(stage,)) for stage in range(config.stages))


def _build(config: TrainConfig, placement: tuple[int, ...], buckets: tuple[Bucket, ...]) -> TrainingDAG:
    return build_dag(
        Schedule(config.schedule),
        placement=placement,
        num_ranks=config.devices,
        num_microbatches=config.microbatches,
        buckets=buckets,
    )
