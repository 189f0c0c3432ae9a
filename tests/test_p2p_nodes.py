"""The sync nodes of ties: where the passes put them, how many there are, and who sends nothing."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from dag_cases import Case, built, cases, edited, planned, texts, with_copies
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.lower import insert_bucket_steps, insert_clip, insert_transfers
from piper_owner.dag.nodes import BucketStep, Collective, Sync, SyncKind, Transfer, parse_action
from piper_owner.dag.rules import Level, check_rules
from piper_owner.errors import DagError
from piper_owner.p2p_nodes import executable, executable_copies, insert_all_reduce, insert_ownership
from piper_owner.schedules import Schedule
from piper_owner.simulate import simulate


def _sync_texts(dag: TrainingDAG, rank: int) -> list[str]:
    return [repr(a) for a in dag.programs[rank] if isinstance(a, Sync | Collective | BucketStep)]


def _num_tied_messages(dag: TrainingDAG) -> int:
    sends = (SyncKind.SEND_GRAD, SyncKind.SEND_WEIGHT)
    return sum(isinstance(a, Sync) and a.kind in sends for program in dag.programs for a in program)


@settings(max_examples=150, deadline=None)
@given(cases(), st.booleans())
def test_every_plan_on_every_placement_runs(case: Case, clip: bool) -> None:
    dag = executable(case.build(), case.plan, clip=clip)
    check_rules(dag, Level.EXECUTABLE)
    timeline = simulate(dag)
    assert [len(timeline.events(rank)) for rank in range(case.num_ranks)] == list(map(len, dag.programs))
    assert _num_tied_messages(dag) == sum(len(tie.replicas) + len(tie.copies) for tie in case.plan.ties)


@settings(max_examples=60, deadline=None)
@given(cases(), st.booleans(), st.booleans())
def test_copies_on_every_placement_run(case: Case, all_reduce: bool, clip: bool) -> None:
    names = [name for tie in case.plan.ties for name in tie.tie.names]
    dag = executable_copies(
        with_copies(case.build(), case.plan, case.placement), case.plan, all_reduce=all_reduce, clip=clip
    )
    simulate(dag)
    stepped = [a.bucket for program in dag.programs for a in program if isinstance(a, BucketStep)]
    assert sorted(stepped) == sorted([*names, *(f"stage{stage}" for stage in range(len(case.placement)))])
    assert _num_tied_messages(dag) == 0


@settings(max_examples=40, deadline=None)
@given(cases(max_ranks=5, max_stages=8, max_microbatches=5))
def test_the_order_of_the_passes_does_not_matter(case: Case) -> None:
    def with_ownership(dag: TrainingDAG) -> TrainingDAG:
        return insert_ownership(dag, case.plan)

    passes = (insert_bucket_steps, insert_transfers, with_ownership)
    results = []
    for order in itertools.permutations(passes):
        dag = case.build()
        for step in order:
            dag = step(dag)
        results.append(dag)
    assert all(result == results[0] for result in results)
    assert insert_clip(results[0]) == executable(case.build(), case.plan, clip=True)


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 2, 0)])
def test_the_number_of_tied_messages_does_not_depend_on_the_microbatches(
    schedule: Schedule, placement: tuple[int, ...]
) -> None:
    plan = planned(placement, [(0, 3), (1, 2)])
    counts = [
        _num_tied_messages(executable(built(placement, m, schedule=schedule), plan)) for m in (1, 4, 16)
    ]
    assert len(set(counts)) == 1
    assert counts[0] == 2 * sum(len(tie.replicas) for tie in plan.ties)


def test_ranks_outside_a_tie_send_and_receive_nothing_of_it() -> None:
    dag = executable(built(range(4), 4), planned(range(4), [(0, 3)]))
    for bystander in (1, 2):
        assert _sync_texts(dag, bystander) == [f"STEP[stage{bystander}]"]
    assert _sync_texts(dag, 0) == [
        "RECV_GRAD[tie0.stage0]<-3",
        "OWNER_STEP[tie0.stage0]",
        "SEND_WEIGHT[tie0.stage0]->3",
        "STEP[stage0]",
    ]
    assert _sync_texts(dag, 3) == ["SEND_GRAD[tie0.stage0]->0", "STEP[stage3]", "RECV_WEIGHT[tie0.stage0]<-0"]


def test_two_ties_at_once_go_in_plan_order() -> None:
    dag = executable(built((0, 1), 2), planned((0, 1), [(0, 1), (0, 1)]))
    assert _sync_texts(dag, 0) == [
        "RECV_GRAD[tie0.stage0]<-1",
        "OWNER_STEP[tie0.stage0]",
        "SEND_WEIGHT[tie0.stage0]->1",
        "RECV_GRAD[tie1.stage0]<-1",
        "OWNER_STEP[tie1.stage0]",
        "SEND_WEIGHT[tie1.stage0]->1",
        "STEP[stage0]",
    ]
    assert _sync_texts(dag, 1) == [
        "SEND_GRAD[tie0.stage0]->0",
        "SEND_GRAD[tie1.stage0]->0",
        "STEP[stage1]",
        "RECV_WEIGHT[tie0.stage0]<-0",
        "RECV_WEIGHT[tie1.stage0]<-0",
    ]


def test_a_gradient_leaves_as_soon_as_it_is_complete() -> None:
    # Stage 3 of rank 1 ends before stage 1 does; the input gradient still goes first.
    program = texts(executable(built((0, 1, 0, 1), 2), planned((0, 1, 0, 1), [(0, 3)])), 1)
    at = program.index("SEND_GRAD[tie0.stage0]->0")
    assert program[at - 2 : at] == ["3B1", "3SEND_B1->2@0"]
    assert program.index("1B1") > at


def test_an_owner_that_is_not_the_earliest_stage_steps_its_own_buckets_first() -> None:
    dag = executable(built((0, 1), 2), planned((0, 1), [(0, 1)], owner="last"))
    assert _sync_texts(dag, 1) == [
        "STEP[stage1]",
        "RECV_GRAD[tie0.stage0]<-0",
        "OWNER_STEP[tie0.stage0]",
        "SEND_WEIGHT[tie0.stage0]->0",
    ]


def test_a_tie_on_one_rank_has_an_owner_step_and_no_message() -> None:
    dag = executable(built((0, 1, 1, 0), 3), planned((0, 1, 1, 0), [(0, 3)]))
    assert _num_tied_messages(dag) == 0
    assert _sync_texts(dag, 0) == ["OWNER_STEP[tie0.stage0]", "STEP[stage0]", "STEP[stage3]"]


def test_a_frozen_tie_has_no_nodes_and_no_bucket() -> None:
    dag = executable(built((0, 1), 3), planned((0, 1), [(0, 1)], frozen=True))
    assert dag == executable(built((0, 1), 3), planned((0, 1), []))


def test_a_clip_stands_between_all_gradients_and_all_steps() -> None:
    dag = executable(built((0, 1), 2), planned((0, 1), [(0, 1), (0, 1)]), clip=True)
    assert _sync_texts(dag, 0) == [
        "RECV_GRAD[tie0.stage0]<-1",
        "RECV_GRAD[tie1.stage0]<-1",
        "CLIP{0,1}",
        "OWNER_STEP[tie0.stage0]",
        "SEND_WEIGHT[tie0.stage0]->1",
        "OWNER_STEP[tie1.stage0]",
        "SEND_WEIGHT[tie1.stage0]->1",
        "STEP[stage0]",
    ]
    assert texts(dag, 1)[-6:] == [
        "SEND_GRAD[tie0.stage0]->0",
        "SEND_GRAD[tie1.stage0]->0",
        "CLIP{0,1}",
        "STEP[stage1]",
        "RECV_WEIGHT[tie0.stage0]<-0",
        "RECV_WEIGHT[tie1.stage0]<-0",
    ]


def test_ranks_that_own_ties_of_one_another_in_a_circle_run() -> None:
    circle = ((0, 1), (1, 2), (2, 0))
    plan = planned((0, 1, 2), circle, owner="first")
    assert [tie.owner for tie in plan.ties] == [0, 1, 2]
    for clip in (False, True):
        simulate(executable(built((0, 1, 2), 4), plan, clip=clip))


def test_all_reduce_has_every_holder_step_its_copy() -> None:
    placement = (0, 1, 2)
    plan = planned(placement, [(0, 2)])
    dag = executable_copies(
        with_copies(built(placement, 2), plan, placement), plan, all_reduce=True, clip=True
    )
    tail = ["ALL_REDUCE[tie0.stage0]{0,2}", "CLIP{0,1,2}", "STEP[stage0]", "STEP[tie0.stage0]"]
    assert _sync_texts(dag, 0) == tail
    assert _sync_texts(dag, 1) == ["CLIP{0,1,2}", "STEP[stage1]"]
    assert _sync_texts(dag, 2)[0] == "ALL_REDUCE[tie0.stage0]{0,2}"
    naive = executable_copies(with_copies(built(placement, 2), plan, placement), plan, all_reduce=False)
    assert _sync_texts(naive, 0) == ["STEP[stage0]", "STEP[tie0.stage0]"]


def test_two_copies_on_one_rank_are_added_there() -> None:
    placement = (0, 1, 1, 0)
    plan = planned(placement, [(0, 3)])
    dag = executable_copies(with_copies(built(placement, 2), plan, placement), plan, all_reduce=True)
    assert "ALL_REDUCE[tie0.stage0]{0}" in texts(dag, 0)
    assert not any("ALL_REDUCE" in text for text in texts(dag, 1))


def test_receives_come_in_the_order_of_the_sends_of_each_pair() -> None:
    dag = insert_transfers(built((0, 1, 0, 1), 6))
    for source, target in ((0, 1), (1, 0)):
        sent = [a for a in dag.programs[source] if isinstance(a, Transfer) and "SEND" in a.kind.value]
        got = [a for a in dag.programs[target] if isinstance(a, Transfer) and "RECV" in a.kind.value]
        assert [(a.stage, a.peer_stage, a.microbatch, a.kind.value[-1]) for a in sent] == [
            (a.peer_stage, a.stage, a.microbatch, a.kind.value[-1]) for a in got
        ]


def test_a_stage_that_feeds_two_others_sends_to_both() -> None:
    dag = dataclasses.replace(built((0, 1, 2), 1), stage_edges=((0, 1), (0, 2), (1, 2)))
    program = texts(insert_transfers(dag), 0)
    assert program[:3] == ["0F0", "0SEND_F0->1@1", "0SEND_F0->2@2"]
    assert program[3:] == ["0RECV_B0<-1@1", "0RECV_B0<-2@2", "0B0"]


def test_passes_refuse_to_run_twice_or_out_of_order() -> None:
    plan = planned((0, 1), [(0, 1)])
    dag = built((0, 1), 1)
    for once in (insert_transfers, insert_bucket_steps, insert_clip):
        with pytest.raises(DagError, match="run this pass once"):
            once(once(dag))
    with pytest.raises(DagError, match="insert_ownership: rank 0 has RECV_GRAD"):
        insert_ownership(insert_ownership(dag, plan), dataclasses.replace(plan, ties=()))
    with pytest.raises(DagError, match="insert_clip after it"):
        insert_ownership(insert_clip(dag), plan)


def test_a_plan_of_another_placement_is_refused() -> None:
    with pytest.raises(DagError, match="for 3 ranks and the TrainingDAG for 2"):
        executable(built((0, 1), 1), planned((0, 1), [], num_ranks=3))
    with pytest.raises(DagError, match=r"stage 1 on rank 0, which runs the stages \[0\]"):
        executable(built((0, 1), 1), planned((1, 0), [(0, 1)]))


def test_a_name_that_is_taken_and_a_copy_without_a_bucket_are_refused() -> None:
    plan = planned((0, 1), [(0, 1)])
    copies = with_copies(built((0, 1), 1), plan, (0, 1))
    with pytest.raises(DagError, match="a bucket of that name exists already"):
        executable(copies, plan)
    with pytest.raises(DagError, match=r"'tie0\.stage0' on rank 0 has no plain bucket there"):
        insert_all_reduce(built((0, 1), 1), plan.ties)


def test_a_missing_producer_is_named() -> None:
    dag = edited(built((0, 1), 1), 0, lambda program: program.remove(parse_action("0F0")))
    with pytest.raises(DagError, match="1F0 on rank 1 needs microbatch 0 of stage 0, which rank 0 never"):
        insert_transfers(dag)
