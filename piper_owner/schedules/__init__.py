"""Pipeline schedules: in which order each rank computes its stages and microbatches."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import assert_never

from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.dag.rules import Level, check_rules
from piper_owner.errors import ConfigError
from piper_owner.schedules.dualpipev import dualpipev
from piper_owner.schedules.engine import Programs
from piper_owner.schedules.gpipe import gpipe
from piper_owner.schedules.interleaved import interleaved
from piper_owner.schedules.one_f_one_b import one_f_one_b
from piper_owner.schedules.placement import Placement, place_stages
from piper_owner.schedules.zbv import zbv

__all__ = [
    "Placement",
    "Schedule",
    "build_dag",
    "dualpipev",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "place_stages",
    "zbv",
]


class Schedule(enum.Enum):
    """The schedules that `build_dag` knows; each runs under any placement.

    INTERLEAVED is made for several stages a rank placed round and round, ZBV and DUALPIPEV for two
    stages a rank placed as a V; these two split backwards in two parts.
    """

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZBV = "zbv"
    DUALPIPEV = "dualpipev"


def build_dag(
    schedule: Schedule,
    *,
    placement: tuple[int, ...],
    num_ranks: int,
    num_microbatches: int,
    buckets: Iterable[Bucket],
    stage_edges: Iterable[tuple[int, int]] | None = None,
) -> TrainingDAG:
    """The TrainingDAG of `schedule`, computes only, at Level.BUILT.

    `stage_edges` are the (early, late) stages between which data goes, early < late; None is the chain
    of neighbours. Computes are ordered as for the chain, which every such set of edges allows.

    Raises ConfigError without at least one microbatch or for an edge that goes back, and DagError when
    placement, edges and buckets do not fit the ranks.
    """
    if num_microbatches < 1:
        raise ConfigError(f"{num_microbatches} microbatches: at least one is needed")
    if stage_edges is None:
        stage_edges = ((stage, stage + 1) for stage in range(len(placement) - 1))
    empty = TrainingDAG(
        placement=placement,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stage_edges=tuple(stage_edges),
        buckets=tuple(buckets),
        programs=((),) * num_ranks,
    )
    for early, late in empty.stage_edges:
        if early > late:
            raise ConfigError(
                f"stage edge {early}->{late} goes back; number the stages so that data goes from a lower to "
                "a higher one"
            )
    dag = TrainingDAG(
        placement=placement,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stage_edges=empty.stage_edges,
        buckets=empty.buckets,
        programs=_programs(schedule, placement, num_ranks, num_microbatches),
    )
    check_rules(dag, Level.BUILT)
    return dag


def _programs(
    schedule: Schedule, placement: tuple[int, ...], num_ranks: int, num_microbatches: int
) -> Programs:
    match schedule:
        case Schedule.GPIPE:
            return gpipe(placement, num_ranks, num_microbatches)
        case Schedule.ONE_F_ONE_B:
            return one_f_one_b(placement, num_ranks, num_microbatches)
        case Schedule.INTERLEAVED:
            return interleaved(placement, num_ranks, num_microbatches)
        case Schedule.ZBV:
            return zbv(placement, num_ranks, num_microbatches)
        case Schedule.DUALPIPEV:
            return dualpipev(placement, num_ranks, num_microbatches)
        case _:
            assert_never(schedule)
