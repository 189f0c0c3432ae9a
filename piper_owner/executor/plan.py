"""Plan one run: who owns what, and every rank's program, before anything is started."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from torch import nn

from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.dag.text import format_dag
from piper_owner.directives import Lowered, Program, lower_program
from piper_owner.errors import ConfigError
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.ports import StagePorts, stage_edges
from piper_owner.executor.source import GPTSource, ModelSource, SplitModel
from piper_owner.ownership import LayoutChoice, OwnershipPlan, ParameterUse, Scope, Use, plan_ownership
from piper_owner.p2p_nodes import executable, executable_copies
from piper_owner.schedules import Placement, Schedule, build_dag, place_stages
from piper_owner.simulate import Timeline, simulate
from piper_owner.stages import full_name
from piper_owner.ties import describe_uses

__all__ = ["RunPlan", "plan_run", "resolve_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run that has passed every rule and the dry run."""

    config: TrainConfig
    run: RunKind
    ports: tuple[StagePorts, ...]
    ownership: OwnershipPlan
    dag: TrainingDAG
    timeline: Timeline

    @property
    def digest(self) -> str:
        """32 hex digits, equal on two ranks exactly when they planned the same with the same options."""
        text = f"{self.config!r}\n{self.run.value}\n{self.ports!r}\n{self.ownership.digest}\n"
        text += format_dag(self.dag)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def resolve_run(config: TrainConfig, source: ModelSource) -> TrainConfig:
    """`config` with what the model and the program decide: stages, devices, pipelines, microbatches.

    Doing it again changes nothing. Pure. Raises InputError for options, a model or a program that do
    not go together.
    """
    config = source.resolve(config)
    if config.program is None:
        return config
    lowered = _lowered(config.program, source.split(config, device="meta"))
    return dataclasses.replace(
        config,
        devices=len(lowered.devices[0]),
        dp=lowered.num_pipelines,
        microbatches=lowered.num_microbatches,
    )


def plan_run(config: TrainConfig, run: RunKind, source: ModelSource | None = None) -> RunPlan:
    """Plan `run`: the model of `source` (the GPT), its ties, owners, and one program a rank.

    Pure: the same on every rank, no process, the model on the meta device. The reference has no plan.

    Raises ConfigError for options that do not suit the model, such as an optimizer that takes no sparse
    gradients or rows of a frozen tie, for an owner that holds no copy, and for
    copies where there is one stage.
    """
    source = GPTSource() if source is None else source
    config = resolve_run(config, source)
    split = source.split(config, device="meta")
    built = _built(config, split)
    placement = built.placement
    uses = _uses(split, placement)
    _check_sparse(config, split, uses)
    ownership = plan_ownership(
        split.ties,
        uses,
        world_size=config.devices,
        owner=config.owner,
        layout=_layouts(config, run, split, uses),
    )
    ownership = dataclasses.replace(ownership, scope=_scope(config, run))
    clip = config.clip is not None
    match run:
        case RunKind.OWNER:
            dag = executable(built, ownership, clip=clip, num_pipelines=config.dp)
        case RunKind.NAIVE | RunKind.ALLREDUCE:
            if config.stages == 1:
                raise ConfigError(
                    f"--compare {run.value} with --stages 1: embedding and head are one parameter there; "
                    "use at least 2 stages"
                )
            names = {name for tie in split.ties for name in tie.names}
            copies = tuple(Bucket(name=use.name, stages=(use.stage,)) for use in uses if use.name in names)
            built = dataclasses.replace(built, buckets=(*built.buckets, *copies))
            dag = executable_copies(
                built,
                ownership,
                all_reduce=run is RunKind.ALLREDUCE,
                clip=clip,
                num_pipelines=config.dp,
            )
        case RunKind.REFERENCE:
            raise ConfigError("the reference is one process: it has no pipeline to plan")
        case _:
            assert_never(run)
    return RunPlan(
        config=config, run=run, ports=split.ports, ownership=ownership, dag=dag, timeline=simulate(dag)
    )


def _scope(config: TrainConfig, run: RunKind) -> Scope:
    """How far an owner's reach goes: copies have none, and a single pipeline is all there is."""
    return Scope(config.scope) if run is RunKind.OWNER and config.dp > 1 else Scope.PIPELINE


def _layout(config: TrainConfig, run: RunKind) -> LayoutChoice:
    """What replicas keep: rows only where an owner serves them, and each pipeline has one."""
    if run is not RunKind.OWNER or (config.layout == "auto" and _scope(config, run) is Scope.GLOBAL):
        return "dense"
    return config.layout


def _layouts(
    config: TrainConfig, run: RunKind, split: SplitModel, uses: Iterable[ParameterUse]
) -> dict[str, LayoutChoice]:
    """By tie, what its replicas keep. A frozen one is kept whole: no step would fetch rows of it."""
    still = {use.name for use in uses if not use.requires_grad}
    frozen = [tie.name for tie in split.ties if not still.isdisjoint(tie.names)]
    layout = _layout(config, run)
    if layout == "rows" and frozen:
        raise ConfigError(
            f"--layout rows, and {', '.join(frozen)} is frozen: rows are fetched for a step, and "
            "it takes none; use --layout auto or dense, which send nothing for it"
        )
    return {tie.name: "dense" if tie.name in frozen else layout for tie in split.ties}


def _check_sparse(config: TrainConfig, split: SplitModel, uses: Iterable[ParameterUse]) -> None:
    """Sparse gradients are for SGD alone, as in torch; one that a dense use is added to is dense."""
    if config.optimizer == "sgd" and config.clip is None:
        return
    given = f"--clip {config.clip}" if config.optimizer == "sgd" else f"--optimizer {config.optimizer}"
    is_sparse = {
        full_name(f"{name}.weight"): module.sparse
        for stage in split.stages.values()
        for name, module in stage.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Embedding)
    }
    whole = {use.name for use in uses if use.use is Use.DENSE or not use.requires_grad}
    tie_of = {name: tie.names for tie in split.ties for name in tie.names}
    for name in is_sparse:
        names = tie_of.get(name, (name,))
        if whole.isdisjoint(names) and all(is_sparse.get(each, False) for each in names):
            raise ConfigError(
                f"{given}: {name} is an nn.Embedding with sparse=True, and torch takes sparse gradients "
                "under sgd without clipping only; leave sparse=True out"
            )


def _uses(split: SplitModel, placement: tuple[int, ...]) -> tuple[ParameterUse, ...]:
    whole = dict.fromkeys(split.dense, Use.DENSE)
    return tuple(
        use
        for stage, rank in enumerate(placement)
        for use in describe_uses({stage: split.stages[stage]}, rank=rank, uses=whole)
    )


def _built(config: TrainConfig, split: SplitModel) -> TrainingDAG:
    """The computes of all ranks, as the program or the schedule has them; a bucket for each stage."""
    buckets = tuple(Bucket(name=f"stage{stage}", stages=(stage,)) for stage in range(config.stages))
    if config.program is not None:
        return dataclasses.replace(_lowered(config.program, split).dag, buckets=buckets)
    return build_dag(
        Schedule(config.schedule),
        placement=place_stages(config.stages, config.devices, Placement(config.placement)),
        num_ranks=config.devices,
        num_microbatches=config.microbatches,
        buckets=buckets,
        stage_edges=stage_edges(split.ports),
    )


def _lowered(program: Program, split: SplitModel) -> Lowered:
    tags = tuple(tuple(sorted(each.items())) for each in split.tags)
    return _lower(program, tags, stage_edges(split.ports))


@functools.lru_cache(maxsize=2)
def _lower(
    program: Program, tags: tuple[tuple[tuple[str, int], ...], ...], edges: tuple[tuple[int, int], ...]
) -> Lowered:
    """A large program takes seconds, and every plan of a run asks for it again."""
    return lower_program(program, tags=[dict(each) for each in tags], stage_edges=edges, buckets=())
