"""TrainingDAGs for tests: small ones by hand, random ones by hypothesis, and ways to break them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.dag.nodes import Action, parse_action
from piper_owner.ownership import (
    LayoutChoice,
    OwnerChoice,
    OwnershipPlan,
    ParameterUse,
    Use,
    plan_ownership,
)
from piper_owner.schedules import Placement, Schedule, build_dag, place_stages

Ties = Sequence[Sequence[int]]
"""Each tie as the stages that use it; a stage's parameter of tie i is named `tie<i>.stage<s>`."""


def built(
    placement: Sequence[int],
    num_microbatches: int,
    *,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    num_ranks: int = 0,
) -> TrainingDAG:
    """A chain of stages, each with one plain bucket."""
    return build_dag(
        schedule,
        placement=tuple(placement),
        num_ranks=num_ranks or max(placement) + 1,
        num_microbatches=num_microbatches,
        buckets=[Bucket(name=f"stage{stage}", stages=(stage,)) for stage in range(len(placement))],
    )


def planned(
    placement: Sequence[int],
    ties: Ties,
    *,
    owner: int | str = "auto",
    num_ranks: int = 0,
    frozen: bool = False,
    lookups: Sequence[int] = (),
) -> OwnershipPlan:
    """A plan of `ties` over the stages of `placement`; one owner for all of them.

    The stages `lookups` look rows up; where that is all that their rank does, it keeps rows only.
    """
    uses = [
        ParameterUse(
            name=f"tie{i}.stage{stage}",
            rank=placement[stage],
            stage=stage,
            shape=(8, 2),
            dtype="float32",
            requires_grad=not frozen,
            use=Use.LOOKUP if stage in lookups else Use.DENSE,
        )
        for i, stages in enumerate(ties)
        for stage in stages
    ]
    names = [[f"tie{i}.stage{stage}" for stage in stages] for i, stages in enumerate(ties)]
    return plan_ownership(
        names,
        uses,
        world_size=num_ranks or max(placement) + 1,
        owner=owner,  # type: ignore[arg-type]
        layout="auto" if lookups else "dense",
    )


def with_copies(dag: TrainingDAG, plan: OwnershipPlan, placement: Sequence[int]) -> TrainingDAG:
    """`dag` with one plain bucket per copy of each tie, named by its parameter."""
    copies = [
        Bucket(name=name, stages=(int(name.rpartition("stage")[2]),))
        for tie in plan.ties
        for name in tie.tie.names
    ]
    return dataclasses.replace(dag, buckets=(*dag.buckets, *copies))


def edited(dag: TrainingDAG, rank: int, edit: Callable[[list[Action]], object]) -> TrainingDAG:
    """`dag` with the program of `rank` changed in place by `edit`."""
    program = list(dag.programs[rank])
    edit(program)
    programs = (*dag.programs[:rank], tuple(program), *dag.programs[rank + 1 :])
    return dataclasses.replace(dag, programs=programs)


def moved(dag: TrainingDAG, rank: int, text: str, before: str) -> TrainingDAG:
    """`dag` with the action `text` of `rank` moved right before its action `before`."""

    def edit(program: list[Action]) -> None:
        action = program.pop(program.index(parse_action(text)))
        program.insert(program.index(parse_action(before)), action)

    return edited(dag, rank, edit)


def dropped(dag: TrainingDAG, rank: int, text: str) -> TrainingDAG:
    """`dag` without the action `text` of `rank`."""
    return edited(dag, rank, lambda program: program.remove(parse_action(text)))


def texts(dag: TrainingDAG, rank: int) -> list[str]:
    """The program of `rank`, as text."""
    return [repr(action) for action in dag.programs[rank]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A random pipeline with random ties.

    `names` has those of each tie; `owners` and `layouts` go by the first one.
    """

    placement: tuple[int, ...]
    num_ranks: int
    num_microbatches: int
    schedule: Schedule
    uses: tuple[ParameterUse, ...]
    names: tuple[tuple[str, ...], ...]
    owners: dict[str, OwnerChoice]
    layouts: dict[str, LayoutChoice]

    @property
    def plan(self) -> OwnershipPlan:
        """Who owns what."""
        return plan_ownership(
            self.names, self.uses, world_size=self.num_ranks, owner=self.owners, layout=self.layouts
        )

    def build(self) -> TrainingDAG:
        """Its TrainingDAG, as the schedule builds it."""
        return built(self.placement, self.num_microbatches, schedule=self.schedule, num_ranks=self.num_ranks)


@st.composite
def cases(draw: st.DrawFn, *, max_ranks: int = 8, max_stages: int = 16, max_microbatches: int = 12) -> Case:
    """1 to 8 devices, 1 to 16 stages placed anyhow, 0 to 3 ties of 2 to 5 uses, any owners and layouts."""
    num_ranks = draw(st.integers(1, max_ranks))
    num_stages = draw(st.integers(1, max_stages))
    anyhow = st.lists(st.integers(0, num_ranks - 1), min_size=num_stages, max_size=num_stages).map(tuple)
    regular = st.sampled_from(Placement).map(lambda placement: place_stages(num_stages, num_ranks, placement))
    placement = draw(anyhow | regular)
    stages = st.lists(
        st.integers(0, num_stages - 1), min_size=min(2, num_stages), max_size=min(5, num_stages), unique=True
    )
    ties = draw(st.lists(stages, max_size=3))
    uses = tuple(
        ParameterUse(
            name=f"tie{i}.stage{stage}",
            rank=placement[stage],
            stage=stage,
            shape=(8, 2),
            dtype="float32",
            use=draw(st.sampled_from(Use)),
        )
        for i, tie in enumerate(ties)
        for stage in tie
    )
    names = tuple(tuple(f"tie{i}.stage{stage}" for stage in tie) for i, tie in enumerate(ties))
    owners: dict[str, OwnerChoice] = {
        name[0]: draw(st.sampled_from(["auto", "first", "last", *(placement[stage] for stage in tie)]))
        for name, tie in zip(names, ties, strict=True)
    }
    layouts: dict[str, LayoutChoice] = {name[0]: draw(st.sampled_from(["dense", "auto"])) for name in names}
    return Case(
        placement=placement,
        num_ranks=num_ranks,
        num_microbatches=draw(st.integers(1, max_microbatches)),
        schedule=draw(st.sampled_from(Schedule)),
        uses=uses,
        names=names,
        owners=owners,
        layouts=layouts,
    )
