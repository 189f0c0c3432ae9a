"""Schedule programs applied to a model: placement, pipelines, microbatches, and who computes when."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
from dag_cases import Case, built, cases
from directive_cases import chain, lowered, order, picked, place, programs, replicate, split, stage_buckets
from hypothesis import given
from hypothesis import strategies as st

from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.lower import insert_transfers
from piper_owner.dag.nodes import parse_action
from piper_owner.directives import Lowered, emit_program, format_program, lower_program, parse_program
from piper_owner.schedules import Placement, Schedule, place_stages
from piper_owner.simulate import simulate

TWO = [place(0, 0), place(1, 1)]


def relowered(dag: TrainingDAG, *, num_pipelines: int = 1) -> Lowered:
    """`dag` as a program, written as JSON, read back and lowered."""
    text = format_program(emit_program(dag, num_pipelines=num_pipelines))
    return lower_program(
        parse_program(text),
        tags=[{"PP": stage} for stage in range(dag.num_stages)],
        stage_edges=dag.stage_edges,
        buckets=dag.buckets,
    )


# Where things run


def test_both_regions_on_one_device() -> None:
    result = lowered([place(0, 0), place(1, 0), split(1), order("0F0 1F0 1B0 0B0")])
    assert programs(result) == ["0F0 1F0 1B0 0B0"]
    assert (result.placement, result.num_microbatches, result.num_pipelines) == ((0, 0), 1, 1)
    assert result.devices == ((0,),)


def test_an_order_for_each_of_two_devices() -> None:
    result = lowered([*TWO, split(1), order("0F0 0B0"), order("1F0 1B0")])
    assert programs(result) == ["0F0 0B0", "1F0 1B0"]
    assert result.devices == ((0, 1),)


def test_ranks_are_devices_by_ascending_number() -> None:
    result = lowered([place(0, 7), place(1, 4), place(2, 7)], 3)
    assert result.placement == (1, 0, 1)
    assert result.devices == ((4, 7),)


def test_a_filter_places_many_regions() -> None:
    assert lowered([place("*", 3)], 3).placement == (0, 0, 0)
    assert lowered([{"op": "place", "filter": {}, "device": "3"}], 3).devices == ((3,),)


def test_replicate_makes_pipelines() -> None:
    both = [place(0, 0), place(1, 2), replicate(0, 0, 1), replicate(1, 2, 3)]
    alike = [place(0, 0, 1), place(1, 2, 3), replicate(0, 0, 1), replicate(1, 2, 3)]
    for program in (both, alike):
        result = lowered(program)
        assert result.num_pipelines == 2
        assert result.placement == (0, 1)
        assert result.devices == ((0, 2), (1, 3))


def test_one_replicate_for_regions_that_share_devices() -> None:
    result = lowered(
        [place("*", 0, 1), {"op": "replicate", "filter": {}, "devices": [0, 1], "reduce_stream": "dp"}]
    )
    assert (result.placement, result.devices) == ((0, 0), ((0,), (1,)))


def test_pipelines_may_run_in_descending_devices() -> None:
    result = lowered([place(0, 5), place(1, 1), replicate(0, 5, 0), replicate(1, 1, 9)])
    assert (result.placement, result.devices) == ((1, 0), ((1, 5), (9, 0)))


def test_regions_of_two_tags_are_picked_together() -> None:
    tags = [{"PP": 0}, {"PP": 1, "EP": 0}, {"PP": 1, "EP": 1}, {"PP": 2}]
    program = [
        {"op": "place", "filter": {"EP": "*"}, "devices": [1]},
        {"op": "place", "filter": {"PP": 0}, "devices": [0]},
        {"op": "place", "filter": {"PP": 2}, "devices": [0]},
        order("0F0 0B0"),
        {"op": "order", "filters": [[{"PP": 1, "EP": 0, "PASS": "F"}], [{"PP": 1, "EP": 1, "PASS": "F"}]]},
    ]
    result = lower_program(
        parse_program(json.dumps(program)), tags=tags, stage_edges=chain(4), buckets=stage_buckets(4)
    )
    assert result.placement == (0, 1, 1, 0)
    assert programs(result)[1] == "1F0 2F0 2B0 1B0"


# Microbatches


def test_without_split_there_is_one_microbatch() -> None:
    assert lowered(TWO).num_microbatches == 1
    assert programs(lowered([*TWO, order("0F0 0B0")])) == ["0F0 0B0", "1F0 1B0"]


def test_microbatches_may_have_a_name_of_their_own() -> None:
    named = {"op": "split", "filter": {}, "dim_name": "chunk", "num_microbatches": 2}
    by_name = {"op": "order", "filters": [[{"PP": 0, "chunk": 1}], [{"PP": 0, "MB": 0}]]}
    assert programs(lowered([place("*", 0), named, by_name], 1)) == ["0F1 0B1 0F0 0B0"]


# Order


def test_without_order_it_is_1f1b() -> None:
    result = lowered([place(0, 0), place(1, 1), place(2, 1), place(3, 0), split(5)], 4)
    assert result.dag == built((0, 1, 1, 0), 5)


def test_groups_follow_in_time_and_filters_in_one_interleave() -> None:
    gpipe = [*TWO, split(3), order("*F *B")]
    assert programs(lowered(gpipe)) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]
    slots = [place("*", 0), split(2), order("0F0 1F0,0F1 1F1,1B0 1B1,0B0 0B1")]
    # Within a slot: backwards first, then the earlier microbatch.
    assert programs(lowered(slots)) == ["0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1"]


def test_a_partial_order_is_completed() -> None:
    result = lowered([*TWO, split(3), order("0F2 0F0")])
    assert programs(result)[0].index("0F2") < programs(result)[0].index("0F0")
    simulate(insert_transfers(result.dag))
    # What the order leaves open stays like 1F1B: stage 0 keeps at most two microbatches.
    partly = lowered([*TWO, split(6), order("1B0 1B1")])
    assert partly.dag == built((0, 1), 6)


def test_the_receiver_follows_a_sender_that_an_order_turns_around() -> None:
    result = lowered([*TWO, split(3), order("0F2 0F1 0F0")])
    assert programs(result) == ["0F2 0F1 0F0 0B2 0B1 0B0", "1F2 1B2 1F1 1B1 1F0 1B0"]


def test_a_filter_without_a_microbatch_means_all() -> None:
    result = lowered([place("*", 0), split(2), order("1F 0B,1B")])
    assert programs(result) == ["0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"]


def test_several_orders_constrain_together() -> None:
    result = lowered([place("*", 0), split(3), order("0F2 0F1"), order("0F1 0F0"), order("0B0 0B2")], 1)
    assert programs(result) == ["0F2 0F1 0B1 0F0 0B0 0B2"]


def test_naming_a_half_splits_that_backward() -> None:
    result = lowered([place("*", 0), split(2), order("0BI1 0BW1 0B0")], 1)
    assert programs(result) == ["0F0 0F1 0I1 0W1 0B0"]
    # B of a split backward is both halves.
    result = lowered([place("*", 0), split(2), order("0BW0 0F1"), order("0B0 0B1")], 1)
    assert programs(result) == ["0F0 0I0 0W0 0F1 0B1"]
    result = lowered([*TWO, split(2), order("1BI 1BW")])
    assert programs(result)[1] == "1F0 1I0 1F1 1I1 1W0 1W1"


def test_no_order_moves_the_weight_half_behind_what_others_wait_for() -> None:
    result = lowered([*TWO, split(2), {"op": "order", "filters": [[{"PASS": "BI"}], [{"PASS": "BW"}]]}])
    assert programs(result) == ["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]


def test_edges_may_skip_stages() -> None:
    edges = [(0, 1), (0, 2), (1, 2)]
    result = lowered([place(0, 0), place(1, 1), place(2, 0), split(2), order("0F0 0F1")], 3, edges=edges)
    assert result.dag.stage_edges == tuple(edges)
    simulate(insert_transfers(result.dag))


def test_an_order_of_one_rank_may_turn_microbatches_around_where_nothing_is_sent() -> None:
    result = lowered([place("*", 0), split(2), order("0F0 0F1"), order("1F1 1F0")])
    assert programs(result) == ["0F0 0F1 1F1 1B1 0B1 1F0 1B0 0B0"]


def test_lowering_is_deterministic() -> None:
    program = [*TWO, split(4), order("0F0 0B0,0F1 0B1,0F2"), order("1BW3 1BI2")]
    assert lowered(program) == lowered(program)


# There and back


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("placement", Placement)
def test_every_schedule_comes_back(schedule: Schedule, placement: Placement) -> None:
    dag = built(place_stages(8, 4, placement), 8, schedule=schedule)
    result = relowered(dag, num_pipelines=3)
    assert result.dag == dag
    assert result.devices == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))


@given(cases(), st.integers(1, 3))
def test_any_placement_comes_back(case: Case, num_pipelines: int) -> None:
    dag = case.build()
    result = relowered(dag, num_pipelines=num_pipelines)
    used = sorted({*dag.placement})
    assert result.dag.programs == tuple(dag.programs[rank] for rank in used)
    assert result.num_pipelines == num_pipelines
    assert result.devices == tuple(
        tuple(rank + pipeline * dag.num_ranks for rank in used) for pipeline in range(num_pipelines)
    )


def test_split_backwards_come_back_and_other_actions_are_left_out() -> None:
    words = "0F0 0F1 0I0 0I1 0W1 0W0"
    dag = built((0, 1), 2)
    program = tuple(map(parse_action, words.split()))
    split_dag = dataclasses.replace(dag, programs=(program, dag.programs[1]))
    assert programs(relowered(insert_transfers(split_dag)))[0] == words


def test_formatted_program_has_one_directive_a_line() -> None:
    text = format_program(emit_program(built((0, 1), 1)))
    assert text == (
        "[\n"
        '  {"op": "place", "filter": {"PP": 0}, "devices": [0], "stream": "pp_stream"},\n'
        '  {"op": "place", "filter": {"PP": 1}, "devices": [1], "stream": "pp_stream"},\n'
        '  {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 1},\n'
        '  {"op": "order", "filters": [\n'
        '    [{"PP": 0, "MB": 0, "PASS": "F"}],\n'
        '    [{"PP": 0, "MB": 0, "PASS": "B"}]\n'
        "  ]},\n"
        '  {"op": "order", "filters": [\n'
        '    [{"PP": 1, "MB": 0, "PASS": "F"}],\n'
        '    [{"PP": 1, "MB": 0, "PASS": "B"}]\n'
        "  ]}\n"
        "]\n"
    )


# Random orders


@st.composite
def ordered_programs(draw: st.DrawFn) -> tuple[list[dict[str, object]], int]:
    """Orders cut at random from one order in which everything could run: so all can be kept."""
    num_stages, num_devices, count = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    directives = [place(stage, draw(st.integers(0, num_devices - 1))) for stage in range(num_stages)]
    whole = [f"{s}F{m}" for m in range(count) for s in range(num_stages)]
    whole += [f"{s}B{m}" for m in range(count) for s in reversed(range(num_stages))]
    for _ in range(draw(st.integers(1, 4))):
        chosen = sorted(draw(st.lists(st.integers(0, len(whole) - 1), min_size=2, unique=True)))
        groups: list[list[object]] = []
        for at in chosen:
            together = draw(st.booleans())
            if groups and together:
                groups[-1].append(picked(whole[at]))
            else:
                groups.append([picked(whole[at])])
        if len(groups) > 1:
            directives.append({"op": "order", "filters": groups})
    return [*directives, split(count)], num_stages


@given(ordered_programs())
def test_orders_that_can_be_kept_are_kept(made: tuple[list[dict[str, object]], int]) -> None:
    directives, num_stages = made
    result = lowered(directives, num_stages)
    simulate(insert_transfers(result.dag))
    place_of = {
        repr(action): (rank, at)
        for rank, program in enumerate(result.dag.programs)
        for at, action in enumerate(program)
    }
    for directive in directives:
        groups = directive.get("filters", [])
        assert isinstance(groups, list)
        spots = [[place_of[f"{f['PP']}{f['PASS']}{f['MB']}"] for f in group] for group in groups]
        for at, group in enumerate(spots):
            for later in (spot for following in spots[at + 1 :] for spot in following):
                assert all(spot[0] != later[0] or spot < later for spot in group)


# Size


def test_ten_thousand_directives_take_seconds() -> None:
    directives = [place(stage, stage % 8) for stage in range(64)] + [split(100)]
    pairs = [(stage, mb) for mb in range(99) for stage in range(64)]
    directives += [order(f"{stage}F{mb} {stage}F{mb + 1}") for stage, mb in pairs]
    directives += [order(f"{stage}B{mb} {stage}B{mb + 1}") for stage, mb in pairs]
    directives = directives[:9_900] + [order("*F0 *B0")] * 100
    start = time.perf_counter()
    lowered(directives, 64)
    assert time.perf_counter() - start < 10
