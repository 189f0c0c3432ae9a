"""Placements and schedules: classic orders, any placement, any number of microbatches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from dag_cases import Case, built, cases, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_owner.dag.graph import Bucket
from piper_owner.dag.lower import insert_transfers, with_programs
from piper_owner.dag.nodes import Action, Compute, ComputeKind
from piper_owner.errors import ConfigError, DagError
from piper_owner.schedules import Placement, Schedule, build_dag, place_stages
from piper_owner.schedules.engine import Choice, Play, Policy
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
@pytest.mark.parametrize("microbatches", [4, 8])
def test_one_stage_a_rank_takes_the_time_of_the_textbook(schedule: Schedule, microbatches: int) -> None:
    stages = 4
    timeline = simulate(insert_transfers(built(range(stages), microbatches, schedule=schedule)))
    # A forward takes 1 and a backward 2, so filling and draining leaves 3 * (stages - 1) idle; where a
    # backward is split, its weight part fills a third of that.
    splits = schedule in (Schedule.ZBV, Schedule.DUALPIPEV)
    idle = (2 if splits else 3) * (stages - 1)
    assert timeline.makespan == 3 * microbatches + idle
    assert [timeline.idle(rank) for rank in range(stages)] == [idle] * stages


def test_interleaved_with_one_stage_a_rank_is_1f1b() -> None:
    for stages, microbatches in itertools.product((1, 2, 4, 5), (1, 3, 4, 9)):
        chain = range(stages)
        assert built(chain, microbatches, schedule=Schedule.INTERLEAVED) == built(chain, microbatches)


def test_the_classic_orders_of_four_stages_on_two_ranks() -> None:
    loop, v = (0, 1, 0, 1), (0, 1, 1, 0)
    expected = {
        (Schedule.INTERLEAVED, loop): (
            "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
            "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
        ),
        (Schedule.ZBV, v): (
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 0F3 3I2 3W2 0I1 0W1 3F3 3I3 0I2 0W2 0I3 3W3 0W3",
            "1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 2W1 1I1 1W1 1F3 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3",
        ),
        (Schedule.DUALPIPEV, v): (
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
            "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
        ),
    }
    for (schedule, placement), programs in expected.items():
        dag = built(placement, 4, schedule=schedule)
        assert [texts(dag, 0), texts(dag, 1)] == [program.split() for program in programs]


@pytest.mark.parametrize(("ranks", "each"), [(2, 2), (4, 2), (3, 3), (2, 4)])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_interleaved_warms_up_as_megatron_does(ranks: int, each: int, rounds: int) -> None:
    placement = place_stages(ranks * each, ranks, Placement.LOOP)
    dag = built(placement, rounds * ranks, schedule=Schedule.INTERLEAVED)
    for rank, program in enumerate(dag.programs):
        kinds = [action.kind for action in program if isinstance(action, Compute)]
        total = each * rounds * ranks
        warm_up = min(2 * (ranks - rank - 1) + (each - 1) * ranks, total)
        forward, backward = ComputeKind.FORWARD, ComputeKind.BACKWARD
        steady = [forward, backward] * (total - warm_up)
        assert kinds == [forward] * warm_up + steady + [backward] * warm_up
        # Rounds of as many microbatches as there are ranks, stage by stage; backwards the other way.
        order = [
            (turn, round_ * ranks + i)
            for round_ in range(rounds)
            for turn in range(each)
            for i in range(ranks)
        ]
        computes = [action for action in program if isinstance(action, Compute)]
        for kind, turns in ((forward, range(each)), (backward, range(each)[::-1])):
            mine = [(c.stage, c.microbatch) for c in computes if c.kind is kind]
            assert mine == [(rank + ranks * turns[turn], microbatch) for turn, microbatch in order]


@pytest.mark.parametrize(
    ("ranks", "each", "microbatches"), [(2, 2, 3), (4, 2, 9), (4, 2, 18), (8, 2, 33), (4, 4, 7)]
)
def test_interleaved_idles_no_longer_for_microbatches_that_ranks_do_not_divide(
    ranks: int, each: int, microbatches: int
) -> None:
    placement = place_stages(ranks * each, ranks, Placement.LOOP)
    timeline = simulate(insert_transfers(built(placement, microbatches, schedule=Schedule.INTERLEAVED)))
    assert timeline.makespan == 3 * (each * microbatches + ranks - 1)


def in_flight(program: Sequence[Action]) -> int:
    """The most forwards of a program whose backward, with its weight part, was not complete."""
    alive = most = 0
    for action in program:
        assert isinstance(action, Compute)
        match action.kind:
            case ComputeKind.FORWARD:
                alive += 1
            case ComputeKind.BACKWARD | ComputeKind.BACKWARD_WEIGHT:
                alive -= 1
            case ComputeKind.BACKWARD_INPUT:
                pass
        most = max(most, alive)
    return most


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 16, 35])
def test_a_v_keeps_no_more_activations_than_published(ranks: int, microbatches: int) -> None:
    placement = place_stages(2 * ranks, ranks, Placement.V)
    zbv = built(placement, microbatches, schedule=Schedule.ZBV)
    assert max(map(in_flight, zbv.programs)) <= min(2 * ranks, 2 * microbatches)
    pairs = built(placement, microbatches, schedule=Schedule.DUALPIPEV)
    assert max(map(in_flight, pairs.programs)) <= min(2 * ranks + 1, 2 * microbatches)


@pytest.mark.parametrize("schedule", [Schedule.ZBV, Schedule.DUALPIPEV])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 7, 40])
def test_a_full_v_idles_only_while_it_fills(schedule: Schedule, ranks: int, more: int) -> None:
    placement = place_stages(2 * ranks, ranks, Placement.V)
    timeline = simulate(insert_transfers(built(placement, 2 * ranks + more, schedule=schedule)))
    # The last rank waits for ranks - 1 forwards; what a rank does not wait at the start it waits at the end.
    assert [timeline.idle(rank) for rank in range(ranks)] == [ranks - 1] * ranks


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
    assert len(dag.topological_order()) == sum(map(len, dag.programs))
    simulate(insert_transfers(dag))


@settings(max_examples=30, deadline=None)
@given(cases())
def test_the_same_input_gives_the_same_schedule(case: Case) -> None:
    assert case.build() == case.build()


class _Idle(Policy):
    """Starts nothing by itself."""

    def choose(self, play: Play, rank: int) -> Choice | None:
        return None


def test_a_policy_that_has_every_rank_wait_ends_all_the_same() -> None:
    placement = (0, 1, 0)
    programs = Play(placement, 2, 2).run(_Idle())
    dag = with_programs(built(placement, 2), programs)  # checks the rules
    assert texts(dag, 0) == ["0F0", "2F0", "0F1", "2F1", "2B0", "0B0", "2B1", "0B1"]
    simulate(insert_transfers(dag))


@pytest.mark.parametrize("schedule", [Schedule.INTERLEAVED, Schedule.ZBV, Schedule.DUALPIPEV])
def test_no_schedule_has_every_rank_wait(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    def unblock(policy: Policy, play: Play) -> Choice:
        raise AssertionError(f"{placement} of {num_microbatches} microbatches waits at {play.num_forwards}")

    monkeypatch.setattr(Policy, "unblock", unblock)
    for ranks, each, num_microbatches in itertools.product((1, 2, 3, 5), (1, 2, 3), (1, 2, 3, 4, 5, 7, 11)):
        for shape in Placement:
            placement = place_stages(ranks * each, ranks, shape)
            built(placement, num_microbatches, schedule=schedule)


def test_data_may_skip_stages() -> None:
    edges = ((0, 1), (1, 2), (0, 3), (2, 3))
    for schedule in Schedule:
        dag = build_dag(
            schedule,
            placement=(0, 1, 2, 0),
            num_ranks=3,
            num_microbatches=4,
            buckets=(),
            stage_edges=iter(edges),
        )
        assert dag.stage_edges == edges
        simulate(insert_transfers(dag))


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
    for edge, error in (((1, 0), ConfigError), ((0, 2), DagError)):
        with pytest.raises(error, match=rf"stage edge {edge[0]}->{edge[1]}"):
            build_dag(
                Schedule.ZBV,
                placement=(0, 1),
                num_ranks=2,
                num_microbatches=1,
                buckets=(),
                stage_edges=[edge],
            )
