"""Pipeline schedules: in which order each rank computes its stages and microbatches."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import assert_never

from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.dag.rules import Level, check_rules
from piper_owner.errors import ConfigError
from piper_owner.schedules.gpipe import gpipe
from piper_owner.schedules.one_f_one_b import one_f_one_b
from piper_owner.schedules.placement import Placement, place_stages

__all__ = ["Placement", "Schedule", "build_dag", "gpipe", "one_f_one_b", "place_stages"]


class Schedule(enum.Enum):
    """The schedules that `build_dag` knows."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"


def build_dag(
    schedule: Schedule,
    *,
    placement: tuple[int, ...],
    num_ranks: int,
    num_microbatches: int,
    buckets: Iterable[Bucket],
    stage_edges: Iterable[tuple[int, int]] | None = None,
) -> TrainingDAG:
    """The TrainingDAG of a pipeline of stages, computes only, at Level.BUILT.

    Stages are computed as in a chain; `stage_edges` says which stage's values go to which, where that
    is not to the next one: from a lower number to a higher one.

    Raises ConfigError without at least one microbatch, and DagError when placement and buckets do
    not fit the ranks.
    """
    if num_microbatches < 1:
        raise ConfigError(f"{num_microbatches} microbatches: at least one is needed")
    empty = TrainingDAG(
        placement=placement,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stage_edges=_chain(len(placement)) if stage_edges is None else tuple(stage_edges),
        buckets=tuple(buckets),
        programs=((),) * num_ranks,
    )
    match schedule:
        case Schedule.GPIPE:
            programs = gpipe(placement, num_ranks, num_microbatches)
        case Schedule.ONE_F_ONE_B:
            programs = one_f_one_b(placement, num_ranks, num_microbatches)
        case _:
            assert_never(schedule)
    dag = TrainingDAG(
        placement=placement,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stage_edges=empty.stage_edges,
        buckets=empty.buckets,
        programs=programs,
    )
    check_rules(dag, Level.BUILT)
    return dag


def _chain(num_stages: int) -> tuple[tuple[int, int], ...]:
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))
