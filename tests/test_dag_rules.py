"""The rule table: each rule finds what breaks it, and names rule, rank, action and remedy."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from dag_cases import Case, built, cases, dropped, edited, moved, planned, texts, with_copies
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from piper_owner.dag.edges import data_edges, offsets
from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.lower import insert_transfers
from piper_owner.dag.nodes import Action, parse_action
from piper_owner.dag.rules import RULES, Level, check_rules, level_of
from piper_owner.errors import DryRunError, RuleViolationError
from piper_owner.p2p_nodes import executable, executable_copies
from piper_owner.schedules import Schedule
from piper_owner.simulate import simulate

TIE = "[tie0.stage0]"


def _good(*, clip: bool = False) -> TrainingDAG:
    """Three ranks; stages 0, 1 and 2 share a parameter that rank 0 owns; two microbatches."""
    return executable(built((0, 1, 2), 2), planned((0, 1, 2), [(0, 1, 2)]), clip=clip)


def _copies() -> TrainingDAG:
    plan = planned((0, 1, 2), [(0, 2), (2, 0)])
    return executable_copies(with_copies(built((0, 1, 2), 2), plan, (0, 1, 2)), plan, all_reduce=True)


def _breaks(dag: TrainingDAG, rule: str, *parts: str, level: Level = Level.EXECUTABLE) -> None:
    assert rule in {known.name for known in RULES}
    with pytest.raises(RuleViolationError) as error:
        check_rules(dag, level)
    lines = [line for line in str(error.value).splitlines() if f"[{rule}]" in line]
    assert lines, str(error.value)
    for part in parts:
        assert any(part in line for line in lines), (part, lines)


def _twice(dag: TrainingDAG, rank: int, text: str) -> TrainingDAG:
    def edit(program: list[Action]) -> None:
        at = program.index(parse_action(text))
        program.insert(at, program[at])

    return edited(dag, rank, edit)


def _added(dag: TrainingDAG, rank: int, text: str) -> TrainingDAG:
    return edited(dag, rank, lambda program: program.append(parse_action(text)))


def _swapped(dag: TrainingDAG, rank: int, one: str, two: str) -> TrainingDAG:
    def edit(program: list[Action]) -> None:
        i, j = program.index(parse_action(one)), program.index(parse_action(two))
        program[i], program[j] = program[j], program[i]

    return edited(dag, rank, edit)


# The three rules of ties.


def test_tie_rule_1_a_replica_sends_its_gradient_once() -> None:
    rule = "tie 1: one gradient send"
    _breaks(_twice(_good(), 2, f"SEND_GRAD{TIE}->0"), rule, "rank 2", "not 2 times")
    _breaks(dropped(_good(), 2, f"SEND_GRAD{TIE}->0"), rule, "rank 2", "not 0 times")


def test_tie_rule_1_not_once_per_microbatch() -> None:
    send = parse_action(f"SEND_GRAD{TIE}->0")
    dag = edited(_good(), 2, lambda program: program.insert(program.index(parse_action("2F1")), send))
    _breaks(dag, "tie 1: one gradient send", "whatever the number of microbatches", "before 2B1")


def test_tie_rule_1_the_gradient_follows_the_last_weight_backward() -> None:
    dag = moved(_good(), 2, f"SEND_GRAD{TIE}->0", "2B1")
    _breaks(dag, "tie 1: one gradient send", "rank 2", f"SEND_GRAD{TIE}->0", "before 2B1", "move it behind")


def test_tie_rule_1_counts_a_deferred_weight_backward() -> None:
    split = edited(
        _good(),
        2,
        lambda program: program.__setitem__(slice(None), _split(program)),
    )
    check_rules(split, Level.EXECUTABLE)
    dag = moved(split, 2, f"SEND_GRAD{TIE}->0", "2W1")
    _breaks(dag, "tie 1: one gradient send", "before 2W1")


def test_the_weight_half_of_a_backward_follows_its_input_half() -> None:
    split = edited(_good(), 2, lambda program: program.__setitem__(slice(None), _split(program)))
    _breaks(_swapped(split, 2, "2I1", "2W1"), "forward before backward", "rank 2, 2W1", "before 2I1")


def _split(program: list[Action]) -> list[Action]:
    words = [re.sub(r"^2B(\d)$", r"2I\1", repr(action)) for action in program]
    at = words.index(f"SEND_GRAD{TIE}->0")
    return [parse_action(word) for word in [*words[:at], "2W0", "2W1", *words[at:]]]


def test_tie_rule_2_every_send_has_one_recv() -> None:
    rule = "tie 2: sends match recvs in order"
    _breaks(dropped(_good(), 0, f"RECV_GRAD{TIE}<-1"), rule, "rank 0", "which sends GRAD")
    _breaks(dropped(_good(), 0, f"SEND_WEIGHT{TIE}->2"), rule, "rank 2", "which sends nothing")
    _breaks(_twice(_good(), 1, f"RECV_WEIGHT{TIE}<-0"), rule, "rank 1")


def test_tie_rule_2_in_the_same_order_on_both_sides() -> None:
    dag = executable(built((0, 1), 2), planned((0, 1), [(0, 1), (0, 1)]))
    swapped = _swapped(dag, 1, f"SEND_GRAD{TIE}->0", "SEND_GRAD[tie1.stage0]->0")
    _breaks(swapped, "tie 2: sends match recvs in order", "rank 0", "message 0 of rank 1", "tie1.stage0")
    swapped = _swapped(dag, 1, f"RECV_WEIGHT{TIE}<-0", "RECV_WEIGHT[tie1.stage0]<-0")
    _breaks(swapped, "tie 2: sends match recvs in order", "rank 1", "message 0 of rank 0")


def test_tie_rule_3_the_owner_steps_after_all_recvs() -> None:
    dag = _swapped(_good(), 0, f"RECV_GRAD{TIE}<-2", f"OWNER_STEP{TIE}")
    _breaks(dag, "tie 3: recvs, step, weights, next use", "rank 0", f"OWNER_STEP{TIE}", "RECV_GRAD")


def test_tie_rule_3_weights_leave_after_the_step() -> None:
    dag = _swapped(_good(), 0, f"SEND_WEIGHT{TIE}->1", f"OWNER_STEP{TIE}")
    _breaks(dag, "tie 3: recvs, step, weights, next use", "rank 0", f"SEND_WEIGHT{TIE}->1", "OWNER_STEP")


def test_tie_rule_3_new_weights_wait_for_the_last_use_of_the_old_ones() -> None:
    rule = "tie 3: recvs, step, weights, next use"
    _breaks(moved(_good(), 1, f"RECV_WEIGHT{TIE}<-0", "1B1"), rule, "rank 1", "before")
    _breaks(moved(_good(), 1, f"RECV_WEIGHT{TIE}<-0", f"SEND_GRAD{TIE}->0"), rule, "before SEND_GRAD")
    _breaks(dropped(_good(), 1, f"RECV_WEIGHT{TIE}<-0"), rule, "rank 1", "not 0 times")
    early = moved(_good(), 1, f"SEND_GRAD{TIE}->0", "1B1")
    _breaks(moved(early, 1, f"RECV_WEIGHT{TIE}<-0", "1B1"), rule, "rank 1, RECV_WEIGHT", "before 1B1")


def test_tie_rule_3_the_owner_steps_once() -> None:
    rule = "tie 3: recvs, step, weights, next use"
    _breaks(_twice(_good(), 0, f"OWNER_STEP{TIE}"), rule, "not 2 times")
    _breaks(dropped(_good(), 0, f"OWNER_STEP{TIE}"), rule, "not 0 times")


# All other rules, one mutation each.


@pytest.mark.parametrize(
    ("change", "rule", "parts"),
    [
        (lambda d: dropped(d, 1, "1F1"), "computed once, where placed", ("rank 1, 1F1", "lacks it")),
        (lambda d: dropped(d, 1, "1B1"), "computed once, where placed", ("rank 1, 1B1", "lacks it")),
        (lambda d: _twice(d, 1, "1F1"), "computed once, where placed", ("already computes it",)),
        (lambda d: _added(d, 1, "1W1"), "computed once, where placed", ("1B1, already computes it",)),
        (lambda d: _added(d, 1, "2F0"), "computed once, where placed", ("placed on rank 2", "move it there")),
        (lambda d: _added(d, 1, "9F0"), "computed once, where placed", ("no such stage or microbatch",)),
        (lambda d: _added(d, 1, "1F2"), "computed once, where placed", ("no such stage or microbatch",)),
        (lambda d: _swapped(d, 2, "2F0", "2B0"), "forward before backward", ("rank 2, 2B0", "before 2F0")),
        (
            lambda d: dropped(d, 0, "0SEND_F1->1@1"),
            "every transfer present",
            ("0SEND_F1->1@1", "feeds stage 1"),
        ),
        (lambda d: dropped(d, 0, "0RECV_B1<-1@1"), "every transfer present", ("rank 0, 0RECV_B1<-1@1",)),
        (lambda d: _twice(d, 0, "0SEND_F1->1@1"), "every transfer present", ("the same transfer",)),
        (lambda d: _added(d, 0, "0SEND_F0->2@2"), "every transfer present", ("no stage edge",)),
        (lambda d: _added(d, 0, "0SEND_F0->1@2"), "every transfer present", ("no stage edge",)),
        (lambda d: moved(d, 0, "0SEND_F1->1@1", "0F1"), "transfers beside their compute", ("before 0F1",)),
        (lambda d: moved(d, 1, "1F1", "1RECV_F1<-0@0"), "transfers beside their compute", ("rank 1",)),
        (
            lambda d: _swapped(d, 1, "1RECV_F0<-0@0", "1RECV_F1<-0@0"),
            "messages in one order",
            ("rank 1", "activation F0 of stage 0", "first in, first out"),
        ),
        (lambda d: dropped(d, 1, "STEP[stage1]"), "every bucket stepped once", ("never stepped",)),
        (lambda d: _twice(d, 1, "STEP[stage1]"), "every bucket stepped once", ("only rank 1 steps it",)),
        (lambda d: _added(d, 0, "STEP[stage1]"), "every bucket stepped once", ("rank 0", "only rank 1")),
        (lambda d: _added(d, 0, f"STEP{TIE}"), "every bucket stepped once", ("remove this step",)),
        (lambda d: _added(d, 0, "STEP[other]"), "every bucket stepped once", ("no such bucket",)),
        (lambda d: moved(d, 1, "STEP[stage1]", "1B1"), "steps follow gradients", ("before 1B1",)),
        (lambda d: moved(d, 0, f"OWNER_STEP{TIE}", "0B1"), "steps follow gradients", ("before 0B1",)),
        (lambda d: _added(d, 1, "SEND_GRAD[other]->0"), "sync nodes belong to a tie", ("not a tie",)),
        (lambda d: _added(d, 1, f"OWNER_STEP{TIE}"), "sync nodes belong to a tie", ("owned by rank 0",)),
        (lambda d: _added(d, 1, f"SEND_GRAD{TIE}->2"), "sync nodes belong to a tie", ("replicas on [1, 2]",)),
        (lambda d: _added(d, 0, "CLIP{0,1,2}"), "one clip on every rank", ("rank 1", "rank 2")),
    ],
)
def test_a_rule_finds(
    change: Callable[[TrainingDAG], TrainingDAG], rule: str, parts: tuple[str, ...]
) -> None:
    _breaks(change(_good()), rule, *parts)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda d: dropped(d, 1, "CLIP{0,1,2}"), ("rank 1",)),
        (lambda d: _twice(d, 1, "CLIP{0,1,2}"), ("rank 1",)),
        (lambda d: _added(dropped(d, 1, "CLIP{0,1,2}"), 1, "CLIP{0,1}"), ("rank 1", "over all ranks")),
        (lambda d: moved(d, 1, "CLIP{0,1,2}", "1B1"), ("before 1B1",)),
        (lambda d: moved(d, 0, "CLIP{0,1,2}", f"RECV_GRAD{TIE}<-2"), (f"before RECV_GRAD{TIE}<-2",)),
        (lambda d: moved(d, 1, "STEP[stage1]", "CLIP{0,1,2}"), ("STEP[stage1]", "before CLIP")),
        (lambda d: moved(d, 0, f"OWNER_STEP{TIE}", "CLIP{0,1,2}"), ("OWNER_STEP", "before CLIP")),
    ],
)
def test_the_rule_of_the_clip_finds(
    change: Callable[[TrainingDAG], TrainingDAG], parts: tuple[str, ...]
) -> None:
    _breaks(change(_good(clip=True)), "one clip on every rank", *parts)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda d: dropped(d, 2, f"ALL_REDUCE{TIE}{{0,2}}"), ("rank 0", "rank 2")),
        (lambda d: _twice(d, 2, f"ALL_REDUCE{TIE}{{0,2}}"), ("stands twice",)),
        (lambda d: _added(d, 1, f"ALL_REDUCE{TIE}{{0,2}}"), ("rank 1", "does not name this rank")),
        (lambda d: _added(d, 1, "ALL_REDUCE[other]{1}"), ("names no bucket",)),
        (lambda d: moved(d, 0, f"ALL_REDUCE{TIE}{{0,2}}", "0B1"), ("before 0B1",)),
        (lambda d: moved(d, 0, "STEP[stage0]", f"ALL_REDUCE{TIE}{{0,2}}"), ("STEP[stage0]",)),
        (
            lambda d: _swapped(d, 0, f"ALL_REDUCE{TIE}{{0,2}}", "ALL_REDUCE[tie1.stage2]{0,2}"),
            ("same all-reduces in the same order",),
        ),
    ],
)
def test_the_rule_of_all_reduces_finds(
    change: Callable[[TrainingDAG], TrainingDAG], parts: tuple[str, ...]
) -> None:
    _breaks(change(_copies()), "all-reduces agree", *parts)


def test_a_clip_follows_the_all_reduces() -> None:
    plan = planned((0, 1), [(0, 1)])
    dag = executable_copies(with_copies(built((0, 1), 2), plan, (0, 1)), plan, all_reduce=True, clip=True)
    early = moved(dag, 0, "CLIP{0,1}", f"ALL_REDUCE{TIE}{{0,1}}")
    _breaks(early, "one clip on every rank", "rank 0, CLIP{0,1}", "before ALL_REDUCE")


def test_stages_of_one_rank_run_in_the_order_of_the_data() -> None:
    dag = built((0, 0), 1, schedule=Schedule.GPIPE)
    _breaks(_swapped(dag, 0, "0F0", "1F0"), "forward before backward", "before 0F0", level=Level.BUILT)
    _breaks(_swapped(dag, 0, "0B0", "1B0"), "forward before backward", "before 1B0", level=Level.BUILT)


def test_a_level_asks_for_no_more_than_it_has() -> None:
    dag = built((0, 1), 2)
    check_rules(dag, Level.BUILT)
    check_rules(dag, Level.SYNCED)  # no ties: nothing is missing
    assert level_of(dag) is Level.BUILT
    _breaks(dag, "every transfer present")
    _breaks(insert_transfers(dag), "every bucket stepped once")
    assert level_of(_good()) is Level.EXECUTABLE
    assert level_of(dropped(_good(), 1, "STEP[stage1]")) is Level.SYNCED


def test_the_message_counts_what_it_does_not_list() -> None:
    idle = dataclasses.replace(built((0, 1), 6), programs=((), ()))
    with pytest.raises(RuleViolationError, match=r"in 24 places:(?s:.*)\.\.\. and 16 more"):
        check_rules(idle, Level.BUILT)


# Mutations of random DAGs: whatever makes them wrong, the rules or the dry run see it.


def _accepted(dag: TrainingDAG) -> bool:
    try:
        check_rules(dag, Level.EXECUTABLE)
        simulate(dag)
    except (RuleViolationError, DryRunError):
        return False
    return True


@st.composite
def _spots(draw: st.DrawFn) -> tuple[TrainingDAG, int, int]:
    """A random executable DAG, a rank that does something, and a position in its program."""
    case: Case = draw(cases(max_ranks=4, max_stages=6, max_microbatches=4))
    dag = executable(case.build(), case.plan, clip=draw(st.booleans()))
    rank = draw(st.sampled_from([rank for rank, program in enumerate(dag.programs) if program]))
    return dag, rank, draw(st.integers(0, len(dag.programs[rank]) - 1))


@settings(max_examples=100, deadline=None)
@given(_spots())
def test_dropping_any_action_is_found(spot: tuple[TrainingDAG, int, int]) -> None:
    dag, rank, position = spot
    # One rank needs no partner for its clip: without it the DAG is one without clipping.
    assume(not (dag.num_ranks == 1 and repr(dag.programs[rank][position]).startswith("CLIP")))
    assert _accepted(dag)
    assert not _accepted(edited(dag, rank, lambda program: program.pop(position)))


@settings(max_examples=100, deadline=None)
@given(_spots(), st.data())
def test_running_any_action_twice_is_found(spot: tuple[TrainingDAG, int, int], data: st.DataObject) -> None:
    dag, rank, position = spot
    program = dag.programs[rank]
    to = data.draw(st.integers(0, len(program)))
    assert not _accepted(edited(dag, rank, lambda copy: copy.insert(to, program[position])))


@settings(max_examples=150, deadline=None)
@given(_spots(), st.data())
def test_moving_any_action_before_one_that_it_needs_is_found(
    spot: tuple[TrainingDAG, int, int], data: st.DataObject
) -> None:
    dag, rank, _ = spot
    start, end = offsets(dag)[rank : rank + 2]
    local = [(a - start, b - start) for a, b in data_edges(dag) if start <= a < end and start <= b < end]
    assume(local)
    source, target = data.draw(st.sampled_from(sorted(local)))
    assert source < target
    assert not _accepted(edited(dag, rank, lambda program: program.insert(source, program.pop(target))))
    assert not _accepted(edited(dag, rank, lambda program: program.insert(target, program.pop(source)))), (
        texts(dag, rank)
    )


@settings(max_examples=100, deadline=None)
@given(_spots(), st.data())
def test_swapping_two_recvs_of_one_peer_is_found(
    spot: tuple[TrainingDAG, int, int], data: st.DataObject
) -> None:
    dag, rank, _ = spot
    recvs: dict[tuple[bool, str], list[int]] = {}
    for position, text in enumerate(texts(dag, rank)):
        if "RECV" in text:
            recvs.setdefault(("[" in text, re.split("@|<-", text)[-1]), []).append(position)
    several = [positions for positions in recvs.values() if len(positions) > 1]
    assume(several)
    positions = data.draw(st.sampled_from(several))
    i, j = data.draw(st.lists(st.sampled_from(positions), min_size=2, max_size=2, unique=True))

    def swap(program: list[Action]) -> None:
        program[i], program[j] = program[j], program[i]

    assert not _accepted(edited(dag, rank, swap))
