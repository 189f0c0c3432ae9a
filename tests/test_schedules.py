"""Placements and schedules: classic orders, any placement, any number of microbatches."""

from __future__ import annotations

import itertools

import pytest
from dag_cases import Case, built, cases, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_owner.dag.graph import Bucket
from piper_owner.dag.lower import insert_transfers
from piper_owner.dag.nodes import Compute, ComputeKind
from piper_owner.errors import ConfigError, DagError
from piper_owner.schedules import Placement, Schedule, build_dag, place_stages
from piper_owner.simulate import simulate


def test_loop_goes_round_the_ranks() -> None:
    assert place_stages(7, 3, Placement.LOOP) == (0, 1, 2, 0, 1, 2, 0)


def test_v_goes_down_and_up_again() -> None:
    assert place_stages(7, 2, Placement.V) == (0, 1, 1, 0, 0, 1, 1)
    assert place_stages(8, 4, Placement.V) == (0, 1, 2, 3, 3, 2, 1, 0)
    assert place_stages(4, 1, Placement.V) == (0, 0, 0, 0)


@given(st.integers(1, 20), st.integers(1, 8))
def test_neighbours_of_a_v_are_at_most_one_rank_apart(num_stages: int, num_ranks: int) -> None:
    placement = place_stages(num_stages, num_ranks, Placement.V)
    assert all(abs(a - b) <= 1 for a, b in itertools.pairwise(placement))
    assert placement[: 2 * num_ranks] == placement[: 2 * num_ranks][::-1] or num_stages < 2 * num_ranks


@pytest.mark.parametrize(("stages", "ranks"), [(0, 1), (1, 0), (-1, 2)])
def test_a_placement_needs_a_stage_and_a_rank(stages: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match="at least one of each"):
        place_stages(stages, ranks, Placement.LOOP)


def test_gpipe_runs_all_forwards_and_then_all_backwards() -> None:
    dag = built((0, 1, 1, 0), 2, schedule=Schedule.GPIPE)
    assert texts(dag, 0) == ["0F0", "0F1", "3F0", "3F1", "3B0", "3B1", "0B0", "0B1"]
    assert texts(dag, 1) == ["1F0", "1F1", "2F0", "2F1", "2B0", "2B1", "1B0", "1B1"]


@pytest.mark.parametrize("num_stages", [1, 2, 4, 5])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 7, 16])
def test_one_stage_a_rank_is_classic_1f1b(num_stages: int, num_microbatches: int) -> None:
    dag = built(range(num_stages), num_microbatches)
    for stage in range(num_stages):
        warm_up = min(num_microbatches, num_stages - stage)
        steady = num_microbatches - warm_up
        expected = [f"{stage}F{m}" for m in range(warm_up)]
        for i in range(steady):
            expected += [f"{stage}B{i}", f"{stage}F{warm_up + i}"]
        expected += [f"{stage}B{m}" for m in range(steady, num_microbatches)]
        assert texts(dag, stage) == expected


@pytest.mark.parametrize("schedule", list(Schedule))
def test_one_stage_a_rank_takes_the_time_of_the_textbook(schedule: Schedule) -> None:
    stages, microbatches = 4, 8
    timeline = simulate(insert_transfers(built(range(stages), microbatches, schedule=schedule)))
    # A forward takes 1 and a backward 2, so filling and draining leaves 3 * (stages - 1) idle.
    assert timeline.makespan == 3 * (microbatches + stages - 1)
    assert [timeline.idle(rank) for rank in range(stages)] == [3 * (stages - 1)] * stages


def test_1f1b_keeps_no_more_activations_than_there_are_stages_left() -> None:
    for placement in ((0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 0, 0)):
        dag = built(placement, 12)
        for program in dag.programs:
            alive = [0] * len(placement)
            for action in program:
                assert isinstance(action, Compute)
                alive[action.stage] += 1 if action.kind is ComputeKind.FORWARD else -1
                assert alive[action.stage] <= len(placement) - action.stage


@settings(max_examples=100, deadline=None)
@given(cases())
def test_any_placement_can_run(case: Case) -> None:
    dag = case.build()  # the rules of the level it reaches are checked there
    assert len(dag.topological_order()) == 2 * len(case.placement) * case.num_microbatches
    simulate(insert_transfers(dag))


@settings(max_examples=30, deadline=None)
@given(cases())
def test_the_same_input_gives_the_same_schedule(case: Case) -> None:
    assert case.build() == case.build()


def test_build_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="0 microbatches"):
        built((0, 1), 0)
    with pytest.raises(DagError, match="stage 1 is placed on rank 2"):
        built((0, 2), 1, num_ranks=2)
    with pytest.raises(DagError, match="bucket 'w': stage 5"):
        build_dag(
            Schedule.GPIPE,
            placement=(0, 1),
            num_ranks=2,
            num_microbatches=1,
            buckets=[Bucket(name="w", stages=(5,))],
        )
