"""Valid plans that something was done to: the rules and the dry run accept none that trains otherwise.

What a mutant trains is found out by `plan_meaning`, which runs it on symbols and knows neither the
rules nor the dry run. Some mutants are as good as the plan they came from, such as one with two
independent steps swapped; those may be accepted, and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import assert_never

import pytest
from dag_cases import Case, built, cases, dropped, edited, moved, planned
from hypothesis import event, given, settings
from hypothesis import strategies as st
from plan_meaning import Broken, Terms, Unfinished, meaning_of

from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.nodes import (
    RECVS,
    SENDS,
    Across,
    AcrossKind,
    Action,
    BucketStep,
    Collective,
    Compute,
    ComputeKind,
    Sync,
    SyncKind,
    Transfer,
    TransferKind,
    parse_action,
)
from piper_owner.dag.rules import Level, check_rules
from piper_owner.errors import DryRunError, RuleViolationError
from piper_owner.ownership import Scope
from piper_owner.p2p_nodes import executable
from piper_owner.schedules import Schedule
from piper_owner.simulate import simulate

Meaning = dict[tuple[int, str], int | None]
Mutation = Callable[[st.DataObject, TrainingDAG], TrainingDAG]


def accepted(dag: TrainingDAG) -> bool:
    """Whether the rules and the dry run have nothing to say."""
    try:
        check_rules(dag, Level.EXECUTABLE)
        simulate(dag)
    except (RuleViolationError, DryRunError):
        return False
    return True


def runs_dry(dag: TrainingDAG) -> bool:
    """Whether the dry run alone has nothing to say."""
    try:
        simulate(dag)
    except DryRunError:
        return False
    return True


def meaning(dag: TrainingDAG, terms: Terms) -> Meaning | str | None:
    """What `dag` trains; None where that makes no sense, "never ends" where it does not even end."""
    try:
        return meaning_of(dag, terms)
    except Unfinished:
        return "never ends"
    except Broken:
        return None


# -- the ways to break a plan


def _place(
    data: st.DataObject, dag: TrainingDAG, wanted: Callable[[Action], bool] = lambda action: True
) -> tuple[int, int]:
    """A rank, and the position in its program of an action that is `wanted`, or of any if there is none."""
    ranks = [rank for rank, program in enumerate(dag.programs) if any(map(wanted, program))]
    if not ranks:
        return _place(data, dag)
    rank = data.draw(st.sampled_from(ranks))
    return rank, data.draw(st.sampled_from([i for i, a in enumerate(dag.programs[rank]) if wanted(a)]))


def _other(data: st.DataObject, count: int, one: int) -> int:
    """A number below `count` other than `one`, if there is one."""
    return (one + data.draw(st.integers(1, max(count - 1, 1)))) % count


def _swap(data: st.DataObject, dag: TrainingDAG) -> TrainingDAG:
    rank, one = _place(data, dag)
    other = _other(data, len(dag.programs[rank]), one)

    def edit(program: list[Action]) -> None:
        program[one], program[other] = program[other], program[one]

    return edited(dag, rank, edit)


def _swap_neighbours(data: st.DataObject, dag: TrainingDAG) -> TrainingDAG:
    rank, at = _place(data, dag)
    return edited(dag, rank, lambda program: program.insert(max(at - 1, 0), program.pop(at)))


def _move(data: st.DataObject, dag: TrainingDAG) -> TrainingDAG:
    rank, at = _place(data, dag)
    to = _other(data, len(dag.programs[rank]), at)
    return edited(dag, rank, lambda program: program.insert(to, program.pop(at)))


def _drop(data: st.DataObject, dag: TrainingDAG) -> TrainingDAG:
    rank, at = _place(data, dag)
    return edited(dag, rank, lambda program: program.pop(at))


def _repeat(data: st.DataObject, dag: TrainingDAG) -> TrainingDAG:
    rank, at = _place(data, dag)
    to = data.draw(st.integers(0, len(dag.programs[rank])))
    return edited(dag, rank, lambda program: program.insert(to, program[at]))


def _move_to_another_rank(data: st.DataObject, dag: TrainingDAG) -> TrainingDAG:
    rank, at = _place(data, dag)
    to_rank = _other(data, dag.num_ranks, rank)
    action = dag.programs[rank][at]
    without = edited(dag, rank, lambda program: program.pop(at))
    to = data.draw(st.integers(0, len(without.programs[to_rank])))
    return edited(without, to_rank, lambda program: program.insert(to, action))


def _change(data: st.DataObject, dag: TrainingDAG) -> TrainingDAG:
    rank, at = _place(data, dag)
    action = dag.programs[rank][at]
    changes = [change for change in _changes(dag, action) if change != action]
    changed = data.draw(st.sampled_from(changes or [action]))
    return edited(dag, rank, lambda program: program.__setitem__(at, changed))


def _changes(dag: TrainingDAG, action: Action) -> list[Action]:
    """`action` with another peer, microbatch, stage, bucket, kind or ranks."""
    replace = dataclasses.replace
    buckets = [bucket.name for bucket in dag.buckets]
    ranks, stages, microbatches = (
        range(dag.num_ranks + 1),
        range(dag.num_stages),
        range(dag.num_microbatches + 1),
    )
    match action:
        case Compute():
            return [
                *(replace(action, kind=kind) for kind in ComputeKind),
                *(replace(action, stage=stage) for stage in stages),
                *(replace(action, microbatch=microbatch) for microbatch in microbatches),
            ]
        case Transfer():
            return [
                *(replace(action, kind=kind) for kind in TransferKind),
                *(replace(action, stage=stage) for stage in stages),
                *(replace(action, peer_stage=stage) for stage in stages),
                *(replace(action, peer=rank) for rank in ranks),
                *(replace(action, microbatch=microbatch) for microbatch in microbatches),
            ]
        case BucketStep():
            return [BucketStep(bucket=name) for name in buckets]
        case Sync(peer=None):
            return [replace(action, bucket=name) for name in buckets]
        case Sync():
            return [
                *(replace(action, kind=kind) for kind in SyncKind if kind is not SyncKind.OWNER_STEP),
                *(replace(action, bucket=name) for name in buckets),
                *(replace(action, peer=rank) for rank in ranks),
            ]
        case Collective():
            others = [action.ranks[:-1], action.ranks[1:], tuple(sorted({*action.ranks, dag.num_ranks}))]
            return [action, *(replace(action, ranks=other) for other in others if other)]
        case Across():
            return [
                *(replace(action, kind=kind) for kind in AcrossKind),
                *(replace(action, bucket=name) for name in buckets),
            ]
        case _:
            assert_never(action)


def _cross(data: st.DataObject, dag: TrainingDAG) -> TrainingDAG:
    """Two messages of a pair change places: at the sender, the receiver, or both."""
    pairs = sorted(
        {
            (rank, action.peer)
            for rank, program in enumerate(dag.programs)
            for action in program
            if isinstance(action, Transfer | Sync) and action.peer is not None and action.kind in SENDS
        }
    )
    if not pairs:
        return dag
    source, target = data.draw(st.sampled_from(pairs))
    if target >= dag.num_ranks:  # an earlier mutation's doing
        return dag
    sends = [i for i, a in enumerate(dag.programs[source]) if _between(a, target, sends=True)]
    recvs = [i for i, a in enumerate(dag.programs[target]) if _between(a, source, sends=False)]
    one = data.draw(st.integers(0, len(sends) - 1))
    other = _other(data, len(sends), one)

    def swap(places: list[int]) -> Callable[[list[Action]], None]:
        def edit(program: list[Action]) -> None:
            i, j = places[one % len(places)], places[other % len(places)]
            program[i], program[j] = program[j], program[i]

        return edit

    where = data.draw(st.sampled_from(["sender", "receiver", "both"]))
    if where != "receiver":
        dag = edited(dag, source, swap(sends))
    return edited(dag, target, swap(recvs)) if where != "sender" and recvs else dag


def _between(action: Action, peer: int, *, sends: bool) -> bool:
    return (
        isinstance(action, Transfer | Sync)
        and action.peer == peer
        and action.kind in (SENDS if sends else RECVS)
    )


def _is_send(action: Action) -> bool:
    return isinstance(action, Transfer | Sync) and action.kind in SENDS


def _is_backward(action: Action) -> bool:
    return isinstance(action, Compute) and action.kind is not ComputeKind.FORWARD


def _drop_message(data: st.DataObject, dag: TrainingDAG) -> TrainingDAG:
    """A send and its recv both go."""
    rank, at = _place(data, dag, _is_send)
    action = dag.programs[rank][at]
    if not (isinstance(action, Transfer | Sync) and action.peer is not None and action.kind in SENDS):
        return dag
    kinds = (TransferKind, SyncKind)[isinstance(action, Sync)]
    back = kinds(action.kind.value.replace("SEND", "RECV"))
    if isinstance(action, Transfer):
        recv: Action = Transfer(
            kind=TransferKind(back), stage=action.peer_stage, peer_stage=action.stage, peer=rank,
            microbatch=action.microbatch,
        )  # fmt: skip
    else:
        recv = Sync(kind=SyncKind(back), bucket=action.bucket, peer=rank)
    without = edited(dag, rank, lambda program: program.pop(at))
    if action.peer >= dag.num_ranks or recv not in dag.programs[action.peer]:
        return without
    return edited(without, action.peer, lambda program: program.remove(recv))


def _exchange_programs(data: st.DataObject, dag: TrainingDAG) -> TrainingDAG:
    one = data.draw(st.integers(0, dag.num_ranks - 1))
    other = _other(data, dag.num_ranks, one)
    programs = list(dag.programs)
    programs[one], programs[other] = programs[other], programs[one]
    return dataclasses.replace(dag, programs=tuple(programs))


def _split_or_join(data: st.DataObject, dag: TrainingDAG) -> TrainingDAG:
    """A whole backward becomes its two parts, the second one somewhere behind; or parts become whole."""
    rank, at = _place(data, dag, _is_backward)
    action = dag.programs[rank][at]
    if not isinstance(action, Compute) or action.kind is ComputeKind.FORWARD:
        return dag
    parts = {kind: dataclasses.replace(action, kind=kind) for kind in ComputeKind}
    whole, first, second = (
        parts[ComputeKind.BACKWARD],
        parts[ComputeKind.BACKWARD_INPUT],
        parts[ComputeKind.BACKWARD_WEIGHT],
    )
    to = data.draw(st.integers(at + 1, len(dag.programs[rank])))
    keep = data.draw(st.sampled_from([first, second]))

    def edit(program: list[Action]) -> None:
        if action == whole:
            program[at] = first
            program.insert(to, second)
        else:
            other = second if keep == first else first
            program[:] = [whole if each == keep else each for each in program if each != other]

    return edited(dag, rank, edit)


MUTATIONS: dict[str, Mutation] = {
    "swap": _swap,
    "swap neighbours": _swap_neighbours,
    "move": _move,
    "drop": _drop,
    "repeat": _repeat,
    "move to another rank": _move_to_another_rank,
    "change": _change,
    "cross messages": _cross,
    "drop a message": _drop_message,
    "exchange programs": _exchange_programs,
    "split or join a backward": _split_or_join,
}


def check_mutants(case: Case, data: st.DataObject) -> None:
    """A mutant that is accepted trains as the plan does; and the dry run finds all that never ends."""
    clip = data.draw(st.booleans())
    num_pipelines = data.draw(st.sampled_from([1, 1, 2]))
    scopes = [Scope.PIPELINE] if any(tie.row_replicas for tie in case.plan.ties) else list(Scope)
    owners = dataclasses.replace(case.plan, scope=data.draw(st.sampled_from(scopes)))
    plan = executable(case.build(), owners, clip=clip, num_pipelines=num_pipelines)
    terms = Terms()
    right = meaning(plan, terms)
    assert isinstance(right, dict)
    assert accepted(plan)
    mutant = plan
    for name in data.draw(st.lists(st.sampled_from(list(MUTATIONS)), min_size=1, max_size=2)):
        mutant = MUTATIONS[name](data, mutant)
    if clip and not any(isinstance(action, Collective) for program in mutant.programs for action in program):
        # A plan without clipping is as good; an executor that is to clip refuses it.
        right = meaning(executable(case.build(), owners, num_pipelines=num_pipelines), terms)
    found = meaning(mutant, terms)
    assert runs_dry(mutant) == (found != "never ends")
    passes = accepted(mutant)
    if mutant == plan:
        event("unchanged")
    else:
        same = "the same" if found == right else "another"
        event(f"{'accepted' if passes else 'refused'}, {same} training")
    assert found == right or not passes


@settings(max_examples=400, deadline=None)
@given(cases(max_ranks=4, max_stages=6, max_microbatches=3), st.data())
def test_a_mutant_that_is_accepted_trains_the_same(case: Case, data: st.DataObject) -> None:
    check_mutants(case, data)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(cases(), st.data())
def test_many_mutants(case: Case, data: st.DataObject) -> None:
    check_mutants(case, data)


# -- the criterion itself


def _plan(schedule: Schedule = Schedule.ONE_F_ONE_B, *, clip: bool = False) -> TrainingDAG:
    dag = built((0, 1, 1, 0), 3, schedule=schedule)
    return executable(dag, planned((0, 1, 1, 0), [(0, 2), (1, 3)]), clip=clip)


def _replaced(dag: TrainingDAG, rank: int, text: str, *others: str) -> TrainingDAG:
    def edit(program: list[Action]) -> None:
        at = program.index(parse_action(text))
        program[at : at + 1] = map(parse_action, others)

    return edited(dag, rank, edit)


def test_every_schedule_trains_the_same() -> None:
    terms = Terms()
    meanings = [meaning(_plan(schedule), terms) for schedule in Schedule]
    assert isinstance(meanings[0], dict)
    assert all(each == meanings[0] for each in meanings)
    assert meaning(_plan(clip=True), terms) != meanings[0]


def test_programs_that_are_as_good_are_known_as_such_and_accepted() -> None:
    dag, terms = _plan(), Terms()
    right = meaning(dag, terms)
    same = [
        moved(dag, 0, "STEP[stage3]", "STEP[stage0]"),
        _replaced(dag, 0, "3B2", "3I2", "3W2"),
        moved(dag, 0, "0F1", "0SEND_F0->1@1"),
    ]
    for mutant in same:
        assert mutant != dag
        assert meaning(mutant, terms) == right
        assert accepted(mutant)


def test_programs_that_train_otherwise_are_known_as_such() -> None:
    dag, terms = _plan(), Terms()
    right = meaning(dag, terms)
    assert meaning(dropped(dag, 0, "STEP[stage0]"), terms) not in (right, None)
    assert meaning(dropped(dag, 0, "0F2"), terms) is None
    assert meaning(_replaced(dag, 0, "3B1", "3B1", "3B1"), terms) not in (right, None)
    assert meaning(_replaced(dag, 0, "3B1", "3I1"), terms) not in (right, None)
    for rank in (0, 1):
        sync = next(a for a in dag.programs[rank] if isinstance(a, Sync) and a.kind is SyncKind.SEND_GRAD)
        assert meaning(dropped(dag, rank, repr(sync)), terms) == "never ends"
        backwards = [
            a for a in dag.programs[rank] if isinstance(a, Compute) and a.kind is ComputeKind.BACKWARD
        ]
        early = moved(dag, rank, repr(sync), repr(backwards[0]))
        assert meaning(early, terms) not in (right, None, "never ends")
