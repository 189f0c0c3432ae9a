"""Schedule programs that do not fit the model, or contradict themselves: one error, the directives quoted."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest
from directive_cases import Directive, lowered, order, place, replicate, split
from hypothesis import given
from hypothesis import strategies as st

from piper_owner.dag.lower import insert_transfers
from piper_owner.directives import lower_program, parse_program
from piper_owner.directives.inference import infer_tags
from piper_owner.errors import ConfigError, DagError, DirectiveError
from piper_owner.simulate import simulate

TWO = [place(0, 0), place(1, 1)]
EVERY = {"op": "place", "filter": {}, "devices": [0]}


def refused(directives: list[Directive], num_stages: int = 2) -> str:
    with pytest.raises(DirectiveError) as raised:
        lowered(directives, num_stages)
    message = str(raised.value)
    assert message.startswith("s.json: ")
    assert "\n" not in message
    return message


def quoted(index: int, directive: Directive) -> str:
    return f"directive[{index}] {json.dumps(directive)}"


# Where


def test_a_region_placed_twice_is_refused() -> None:
    again = place("*", 1)
    message = refused([place(0, 0), again])
    assert quoted(1, again) in message
    assert f"PP 0 is placed already, by {quoted(0, place(0, 0))}" in message
    assert "PP 0 is placed already" in refused([place(0, 0), place(1, 0), place(0, 0)])


def test_a_region_placed_nowhere_is_refused() -> None:
    message = refused([place(0, 0)])
    assert 'none of its 1 directives places PP 1; add {"op": "place", "filter": {"PP": 1}' in message
    assert "none of its 0 directives places PP 0" in refused([])


def test_unknown_tags_and_indices_are_refused() -> None:
    wrong = {"op": "place", "filter": {"TP": 0}, "devices": [0]}
    message = refused([wrong])
    assert quoted(0, wrong) in message
    assert "no region has the tag 'TP'; the tags of the model are 'PP', 'MB', 'PASS'" in message
    assert "no region has 'PP' 4; the model has 'PP' 0 to 3" in refused([place(4, 0)], 4)
    assert "no region has 'PP' 2; the model has 'PP' 0, 1" in refused([*TWO, order("0F0 2F0")])
    assert quoted(2, order("0F0 2F0")) in refused([*TWO, order("0F0 2F0")])
    assert "no region has 'PP' 9" in refused([*TWO, replicate(9, 0)])


def test_tags_that_no_region_has_together_are_refused() -> None:
    program = parse_program(
        json.dumps([EVERY, {"op": "order", "filters": [[{"PP": 0, "EP": 1}], [{"PP": 1}]]}])
    )
    with pytest.raises(
        DirectiveError, match="no region has EP 1 and PP 0 together; the regions are PP 0; PP 1 EP 1"
    ):
        lower_program(program, tags=[{"PP": 0}, {"PP": 1, "EP": 1}], stage_edges=[(0, 1)], buckets=())


@pytest.mark.parametrize("tag", ["PASS", "MB"])
@pytest.mark.parametrize("op", ["place", "replicate", "split"])
def test_only_orders_pick_passes_and_microbatches(op: str, tag: str) -> None:
    picked = {"PP": 0, tag: "F" if tag == "PASS" else 0}
    wrong: Directive = {"op": op, "filter": picked}
    wrong |= {"num_microbatches": 2} if op == "split" else {"devices": [0]}
    words = f'{op} takes whole regions, with all their passes and microbatches: leave "PASS"'
    assert words in refused([wrong] if op == "place" else [EVERY, wrong])


def test_several_devices_need_replicate() -> None:
    message = refused([place(0, 0, 1), place(1, 2)])
    assert quoted(0, place(0, 0, 1)) in message
    assert "it lists 2 devices for PP 0, and no replicate directive makes copies of that: list one" in message


def test_place_and_replicate_agree() -> None:
    message = refused([place("*", 1), replicate("*", 0, 1)])
    assert quoted(1, replicate("*", 0, 1)) in message
    assert f"it runs PP 0 on devices [0, 1], but {quoted(0, place('*', 1))} puts it on [1]" in message
    assert "let place list the same devices, or the first of them" in message
    assert "puts it on [0, 1]" in refused([place("*", 0, 1), replicate("*", 0, 1, 2)])


def test_a_region_is_replicated_once() -> None:
    message = refused([place("*", 0), replicate(0, 0, 1), replicate("*", 0, 1)])
    assert f"PP 0 is replicated already, by {quoted(1, replicate(0, 0, 1))}" in message


def test_every_region_runs_in_every_pipeline() -> None:
    message = refused([place(0, 0), place(1, 2), replicate(0, 0, 1)])
    assert message.startswith(f"s.json: {quoted(1, place(1, 2))}: it runs PP 1 in one pipeline, but ")
    assert f"{quoted(2, replicate(0, 0, 1))} runs PP 0 in 2 pipelines: every region runs once" in message
    both = [place(0, 0), place(1, 2), replicate(0, 0, 1), replicate(1, 2, 3, 4)]
    assert "it runs PP 1 in 3 pipelines, but directive[2]" in refused(both)


def test_pipelines_are_equal_and_apart() -> None:
    shared = [place("*", 0), replicate(0, 0, 1), replicate(1, 0, 2)]
    assert "pipeline 1 would run on devices 1 and 2 what pipeline 0 runs on device 0" in refused(shared)
    swapped = [place(0, 0), place(1, 1), replicate(0, 0, 1), replicate(1, 1, 0)]
    message = refused(swapped)
    assert "device 1 would work for pipeline 0, but " in message
    assert (
        f"{quoted(2, replicate(0, 0, 1))} has it work for pipeline 1: every pipeline has devices" in message
    )
    merged = [place(0, 0), place(1, 1), replicate(0, 0, 2), replicate(1, 1, 2)]
    assert "device 2 would work for pipeline 1, but directive[2]" in refused(merged)
    assert "work for another device of pipeline 1" in refused(merged)


# Microbatches


def test_splitting_twice_is_refused() -> None:
    message = refused([*TWO, split(2), split(4)])
    assert quoted(3, split(4)) in message
    assert f"the batch is split already, by {quoted(2, split(2))}; keep one of the two" in message


def test_splitting_some_regions_is_refused() -> None:
    part = {"op": "split", "filter": {"PP": 0}, "num_microbatches": 2}
    message = refused([*TWO, part])
    assert quoted(2, part) in message
    assert "it splits some regions and not others, such as PP 1: every region runs the same" in message


def test_microbatches_are_not_called_as_a_tag() -> None:
    named = {"op": "split", "filter": {}, "dim_name": "PP", "num_microbatches": 2}
    assert "the microbatches are called 'PP', which is a tag of the model" in refused([*TWO, named])


def test_a_microbatch_that_is_not_there_is_refused() -> None:
    message = refused([*TWO, split(2), order("0F0 0F2")])
    assert "there is no microbatch 2: the batch is split into 2, 0 to 1" in message
    assert "the batch is split into 1, 0 to 0" in refused([*TWO, order("0F0 0F1")])
    named = {"op": "split", "filter": {}, "dim_name": "m", "num_microbatches": 2}
    two_names = {"op": "order", "filters": [[{"m": 0, "MB": 1}], [{"PP": 1}]]}
    assert "names two microbatches, 0 and 1" in refused([*TWO, named, two_names]).replace(
        "1 and 0", "0 and 1"
    )


def test_too_many_microbatches_are_refused_before_they_are_made() -> None:
    start = time.perf_counter()
    message = refused([*TWO, split(2**31 - 1), order("*F *B")])
    assert "2147483647 microbatches of 2 regions are more than 1048576 together; split into fewer" in message
    assert time.perf_counter() - start < 1


# When


def test_an_order_against_the_data_is_refused() -> None:
    wrong = order("0B0 0F0")
    message = refused([*TWO, split(2), wrong])
    assert message.startswith(f"s.json: {quoted(3, wrong)}: it contradicts the data dependencies: ")
    assert (
        "B of PP 0 MB 0 comes before F of PP 0 MB 0, says directive[3]; F of PP 0 MB 0 comes before "
        in message
    )
    assert "B of PP 0 MB 0, which needs its result; no order does all of that" in message
    assert "it contradicts the data dependencies" in refused([*TWO, split(2), order("0BW0 0BI0")])
    assert "it contradicts the data dependencies" in refused([*TWO, order("1F0 0F0")])
    # Another order may say what the data say, too: that one is not at fault.
    message = refused([*TWO, order("0F0 0B0"), order("0B0 0F0")])
    assert message.startswith(f"s.json: {quoted(3, order('0B0 0F0'))}: it contradicts the data dependencies")


def test_an_order_in_which_two_ranks_wait_for_each_other_is_refused() -> None:
    there_and_back = [place(0, 0), place(1, 1), place(2, 0), split(2)]
    wrong = order("0F0 2F1 0F1")
    message = refused([*there_and_back, wrong], 3)
    assert quoted(4, wrong) in message
    assert "F of PP 1 MB 1 comes before F of PP 2 MB 1, which needs its result" in message
    both = [order("2F0 0F1"), order("1F1 1F0")]
    message = refused([*there_and_back, *both], 3)
    assert f"{quoted(4, both[0])}: it contradicts {quoted(5, both[1])} and the data dependencies" in message


def test_two_orders_in_opposite_directions_are_refused() -> None:
    message = refused([*TWO, split(3), order("0F0 0F1"), order("0F1 0F2"), order("0F2 0F0")])
    assert f"{quoted(3, order('0F0 0F1'))}: it contradicts {quoted(4, order('0F1 0F2'))} and " in message
    assert quoted(5, order("0F2 0F0")) in message


def test_one_compute_in_two_groups_is_refused() -> None:
    message = refused([*TWO, split(2), order("0F0 0F1 0F0")])
    assert quoted(3, order("0F0 0F1 0F0")) in message
    assert "two of its groups, 0 and 2, pick F of PP 0 MB 0, which cannot come before itself" in message
    assert "two of its groups, 0 and 1, pick F of PP 0 MB 0" in refused([*TWO, order("0F0 0F0")])
    assert "two of its groups, 1 and 2, pick B of PP 1" in refused([*TWO, split(2), order("*F *B 1B0")])
    assert "two of its groups, 0 and 1, pick F of PP 0" in refused([*TWO, order("0 *F")])


def test_crosswise_messages_of_two_ranks_are_refused() -> None:
    sender, receiver = order("0F0 0F1"), order("1F1 1F0")
    message = refused([*TWO, split(2), sender, receiver])
    assert f"{quoted(4, receiver)}: it crosses with {quoted(3, sender)}: two ranks' messages" in message
    assert "the activations that stage 0 sends to stage 1, are made for microbatch 0 before 1" in message
    assert "first in, first out" in message
    back = refused([*TWO, split(2), order("1B0 1B1"), order("0B1 0B0")])
    assert "the gradients that stage 1 sends to stage 0" in back
    alone = {"op": "order", "filters": [[{"PP": 0, "MB": 1}, {"PP": 1, "MB": 0}], [{"PP": 0, "MB": 0}]]}
    assert "directive[3]" in refused([*TWO, split(2), alone])


def test_a_long_circle_is_told_in_short() -> None:
    stages, count = 16, 8
    directives = [place(stage, stage) for stage in range(stages)] + [split(count)]
    directives += [order(f"{stages - 1}B0 0F0")]
    message = refused(directives, stages)
    assert "steps in all" in message
    assert len(message) < 1_000


def test_a_circle_among_many_orders_names_few() -> None:
    orders = [order(f"0F{m} 0F{m + 1}") for m in range(199)]
    message = refused([*TWO, split(200), *orders, order("0F120 0F117")])
    assert message.count("directive[") <= 12
    assert quoted(3 + 199, order("0F120 0F117")) in message


# Arguments


def test_a_model_without_regions_or_with_reserved_tags_is_refused() -> None:
    program = parse_program(json.dumps([EVERY]))
    with pytest.raises(ConfigError, match="at least one region"):
        lower_program(program, tags=[], stage_edges=[], buckets=[])
    for tag in ("PASS", "MB"):
        with pytest.raises(ConfigError, match="choose another tag"):
            lower_program(program, tags=[{tag: 0}], stage_edges=[], buckets=[])


def test_edges_that_do_not_fit_are_refused() -> None:
    program = parse_program(json.dumps([EVERY]))
    with pytest.raises(DagError, match="stage edge 0->3"):
        lower_program(program, tags=[{"PP": 0}], stage_edges=[(0, 3)], buckets=[])


# Anything at all


def mutated(draw: st.DrawFn, value: Any) -> Any:  # noqa: ANN401
    """`value` with one part of it changed."""
    if isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        match draw(st.sampled_from(["change", "drop", "double", "swap"])):
            case "change":
                value[at] = mutated(draw, value[at])
            case "drop":
                del value[at]
            case "double":
                value.insert(at, copy.deepcopy(value[draw(st.integers(0, len(value) - 1))]))
            case "swap":
                other = draw(st.integers(0, len(value) - 1))
                value[at], value[other] = value[other], value[at]
        return value
    if isinstance(value, dict) and value:
        name = draw(st.sampled_from(sorted(value)))
        if draw(st.booleans()):
            value[name] = mutated(draw, value[name])
        else:
            del value[name]
        return value
    return draw(
        st.sampled_from(
            [0, 1, 2, 3, 99, -1, "0", "1", "*", "F", "B", "BI", "BW", "MB", "PP", "", None, True, [], {}]
        )
    )


@st.composite
def nearly_right(draw: st.DrawFn) -> list[Directive]:
    directives: list[Directive] = [place(0, 0), place(1, 1), place(2, 1), place(3, 0)]
    if draw(st.booleans()):
        groups = {0: (0, 2), 1: (1, 3), 2: (1, 3), 3: (0, 2)}
        directives += [replicate(stage, *devices) for stage, devices in groups.items()]
    directives += [
        split(2),
        order("0F0 0F1 3F0 3B0 3F1,3B1 0B0 0B1"),
        order("1F0 2F0 1F1,2F1 2B0 1BI0 1BW0,2B1 1B1"),
    ]
    for _ in range(draw(st.integers(0, 3))):
        mutated(draw, directives)
    return directives


@given(nearly_right())
def test_a_mutated_program_runs_or_is_refused(directives: list[Directive]) -> None:
    try:
        program = parse_program(json.dumps(directives), source="s.json")
        result = lowered(directives, 4)
    except DirectiveError as error:
        text = str(error)
    else:
        simulate(insert_transfers(result.dag))
        assert infer_tags(program)
        return
    assert "\n" not in text
    assert "directive[" in text or "directives places" in text


def test_regions_are_inferred_from_places() -> None:
    def tags(*directives: Directive) -> list[dict[str, int]]:
        return [dict(own) for own in infer_tags(parse_program(json.dumps(directives)))]

    assert tags(place(2, 0), place(0, 0)) == [{"PP": 0}, {"PP": 1}, {"PP": 2}]
    assert tags(EVERY) == [{"PP": 0}]
    assert tags(EVERY, order("0F0 3F0")) == [{"PP": stage} for stage in range(4)]
    assert tags({"op": "place", "filter": {"STAGE": 1}, "device": 0}) == [{"STAGE": 0}, {"STAGE": 1}]
    both = {"op": "place", "filter": {"PP": 1, "EP": 0}, "device": 0}
    assert tags(both, place(0, 0), place("*", 1)) == [{"PP": 0}, {"EP": 0, "PP": 1}]
    with pytest.raises(DirectiveError, match="it names 'PP' 100000; fewer than 100000"):
        tags(place(100_000, 0))
