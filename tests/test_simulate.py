"""The dry run: what it accepts, what it finds, and the grid that its errors show."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from dag_cases import Case, built, cases, dropped, edited, moved, planned
from hypothesis import given, settings

from piper_owner.dag.graph import EdgeKind, TrainingDAG
from piper_owner.dag.lower import insert_transfers
from piper_owner.dag.nodes import Action, Compute, Transfer, parse_action
from piper_owner.errors import DeadlockError, DryRunError, MisorderedMessageError, UnmatchedMessageError
from piper_owner.p2p_nodes import executable
from piper_owner.schedules import Placement, Schedule, place_stages
from piper_owner.simulate import simulate

TIE = "[tie0.stage0]"


def _pair(num_microbatches: int = 2, *, clip: bool = False) -> TrainingDAG:
    return executable(built((0, 1), num_microbatches), planned((0, 1), [(0, 1)]), clip=clip)


def _programs(*programs: str, num_microbatches: int = 9) -> TrainingDAG:
    """Programs as written, over one stage a rank; the dry run asks for no more."""
    placement = tuple(range(len(programs)))
    return TrainingDAG(
        placement=placement,
        num_ranks=len(programs),
        num_microbatches=num_microbatches,
        stage_edges=tuple(pairwise(placement)),
        buckets=(),
        programs=tuple(tuple(map(parse_action, program.split())) for program in programs),
    )


def test_the_timeline_of_a_small_pipeline() -> None:
    timeline = simulate(_pair())
    assert [(repr(event.action), event.start, event.end) for event in timeline.events(1)] == [
        ("1RECV_F0<-0@0", 0, 1),
        ("1F0", 1, 2),
        ("1B0", 2, 4),
        ("1SEND_B0->0@0", 4, 4),
        ("1RECV_F1<-0@0", 4, 4),
        ("1F1", 4, 5),
        ("1B1", 5, 7),
        ("1SEND_B1->0@0", 7, 7),
        (f"SEND_GRAD{TIE}->0", 7, 7),
        ("STEP[stage1]", 7, 8),
        (f"RECV_WEIGHT{TIE}<-0", 8, 10),
    ]
    # Rank 0 ends last: two forwards, two backwards and two steps, after waiting for 1B0 and 1B1.
    assert timeline.makespan == 11
    assert timeline.idle(0) == 11 - (2 + 4 + 2)
    assert timeline.idle(1) == 11 - (2 + 4 + 1)


def test_the_grid_of_a_small_pipeline() -> None:
    assert simulate(insert_transfers(built((0, 1), 1))).format_grid() == "\n".join(
        [
            "time  rank 0         rank 1",
            "0     0F0            1RECV_F0<-0@0",
            "1     0SEND_F0->1@1  1F0",
            "      0RECV_B0<-1@1",
            "2                    1B0",
            "4     0B0            1SEND_B0->0@0",
        ]
    )


def test_durations_are_those_given_and_messages_fly() -> None:
    def seconds(action: Action) -> float:
        return 10.0 if isinstance(action, Transfer) and "SEND" in action.kind.value else 1.0

    timeline = simulate(insert_transfers(built((0, 1), 1)), seconds)
    # 0F0, the flight, taking it in, 1F0, 1B0, the flight back, taking it in, 0B0.
    assert timeline.makespan == 1 + 10 + 1 + 1 + 1 + 10 + 1 + 1
    assert timeline.events(0)[1].start == timeline.events(0)[1].end == 1, "a send takes no time of the sender"


def test_a_collective_waits_for_its_last_rank() -> None:
    timeline = simulate(_programs("0F0 0F1 CLIP{0,1} 0B0", "1F0 CLIP{0,1}", "2F0"))
    assert [(event.start, event.end) for event in timeline.events(1)] == [(0, 1), (1, 2)]
    assert timeline.makespan == 4
    assert [timeline.idle(rank) for rank in range(3)] == [0, 3, 3]


@settings(max_examples=60, deadline=None)
@given(cases(max_ranks=5, max_stages=8, max_microbatches=5))
def test_time_keeps_every_edge_and_no_rank_does_two_things_at_once(case: Case) -> None:
    dag = executable(case.build(), case.plan, clip=True)
    timeline = simulate(dag)
    ends = {}
    starts = {}
    for rank in range(case.num_ranks):
        for event in timeline.events(rank):
            starts[rank, event.action], ends[rank, event.action] = event.start, event.end
        for before, after in pairwise(timeline.events(rank)):
            assert before.end <= after.start
        work = sum(
            event.end - event.start for event in timeline.events(rank) if isinstance(event.action, Compute)
        )
        assert work <= timeline.makespan - timeline.idle(rank)
    for edge in dag.edges():
        source, target = (edge.source.rank, edge.source.action), (edge.target.rank, edge.target.action)
        if edge.kind is EdgeKind.TEMPORAL:
            assert ends[source] <= starts[target]
        else:
            assert ends[source] <= ends[target]


def test_a_planted_deadlock_is_found_and_shown() -> None:
    dag = moved(_pair(), 0, "0RECV_B0<-1@1", "0F0")
    with pytest.raises(DeadlockError) as error:
        simulate(dag)
    text = str(error.value)
    assert "rank 0 waits at 0RECV_B0<-1@1 (action 0) for rank 1" in text
    assert "rank 1 waits at 1RECV_F0<-0@0 (action 0) for rank 0" in text
    assert text.splitlines()[1:] == [
        "time  rank 0             rank 1",
        "0     >>0RECV_B0<-1@1<<  >>1RECV_F0<-0@0<<",
    ]


def test_a_deadlock_later_on_shows_what_ran_before() -> None:
    dag = moved(_pair(4), 0, "0RECV_B1<-1@1", "0SEND_F2->1@1")
    dag = moved(dag, 1, "1RECV_F2<-0@0", "1B1")
    with pytest.raises(DeadlockError) as error:
        simulate(dag)
    lines = str(error.value).splitlines()
    assert any(re.search(r"^1\s+0SEND_F0->1@1\s+1F0$", line) for line in lines)
    assert any(">>0RECV_B1<-1@1<<" in line for line in lines)
    assert any(">>1RECV_F2<-0@0<<" in line for line in lines)


def test_a_deadlock_of_ties_is_found() -> None:
    # Each owner wants the other's gradient before it gives its own away.
    dag = executable(built((0, 1), 1), planned((0, 1), [(0, 1), (1, 0)], owner="first"))
    dag = moved(dag, 0, "RECV_GRAD[tie0.stage0]<-1", "SEND_GRAD[tie1.stage1]->1")
    dag = moved(dag, 1, "RECV_GRAD[tie1.stage1]<-0", "SEND_GRAD[tie0.stage0]->0")
    with pytest.raises(DeadlockError, match=r"rank 0 waits at RECV_GRAD\[tie0") as error:
        simulate(dag)
    assert ">>RECV_GRAD[tie1.stage1]<-0<<" in str(error.value)


def test_a_deadlock_around_a_collective_is_found() -> None:
    dag = _programs("CLIP{0,1} 0SEND_F0->1@1", "1RECV_F0<-0@0 CLIP{0,1}")
    with pytest.raises(DeadlockError, match=r"rank 0 waits at CLIP\{0,1\} \(action 0\) for rank 1"):
        simulate(dag)
    crossed = _programs("ALL_REDUCE[a]{0,1} ALL_REDUCE[b]{0,1}", "ALL_REDUCE[b]{0,1} ALL_REDUCE[a]{0,1}")
    with pytest.raises(DeadlockError, match="rank 1 waits at ALL_REDUCE"):
        simulate(crossed)


def test_ranks_that_wait_for_the_circle_are_not_named_as_part_of_it() -> None:
    dag = _programs(
        "0RECV_B0<-1@1",
        "1RECV_F0<-2@2 1SEND_B0->0@0 1SEND_F0->2@2",
        "2RECV_F0<-1@1 2SEND_F0->1@1",
    )
    with pytest.raises(DeadlockError) as error:
        simulate(dag)
    first = str(error.value).splitlines()[0]
    assert "rank 1 waits" in first
    assert "rank 2 waits" in first
    assert "rank 0 waits" not in first


def test_a_planted_misorder_is_found_and_shown() -> None:
    dag = _pair(3)

    def swap(program: list[Action]) -> None:
        i, j = program.index(parse_action("1RECV_F0<-0@0")), program.index(parse_action("1RECV_F1<-0@0"))
        program[i], program[j] = program[j], program[i]

    with pytest.raises(MisorderedMessageError) as error:
        simulate(edited(dag, 1, swap))
    text = str(error.value)
    assert "rank 1 awaits 1RECV_F1<-0@0 from rank 0, whose next message to it is 0SEND_F0->1@1" in text
    assert "0     0F0                >>1RECV_F1<-0@0<<" in text.splitlines()


def test_messages_that_differ_only_in_a_stage_are_told_apart() -> None:
    for first, second in (("0SEND_F0->1@1", "2SEND_F0->1@1"), ("0SEND_F0->1@1", "0SEND_F0->3@1")):
        recvs = [f"{m[-3]}RECV_F0<-{m[0]}@0" for m in (second, first)]
        with pytest.raises(MisorderedMessageError):
            simulate(_programs(f"{first} {second}", " ".join(recvs)))


def test_the_two_channels_of_a_pair_do_not_disturb_each_other() -> None:
    simulate(_programs("SEND_GRAD[w]->1 0SEND_F0->1@1", "1RECV_F0<-0@0 RECV_GRAD[w]<-0"))
    with pytest.raises(MisorderedMessageError):
        simulate(_programs("SEND_GRAD[v]->1 SEND_GRAD[w]->1", "RECV_GRAD[w]<-0 RECV_GRAD[v]<-0"))


def test_a_message_that_nobody_sends_is_found() -> None:
    with pytest.raises(
        UnmatchedMessageError, match=r"rank 1 waits at RECV_WEIGHT.*for rank 0, whose program has"
    ):
        simulate(dropped(_pair(), 0, f"SEND_WEIGHT{TIE}->1"))
    with pytest.raises(UnmatchedMessageError, match="which never sends what is awaited"):
        simulate(dropped(_pair(), 0, "0SEND_F0->1@1"))


def test_a_message_that_nobody_receives_is_found_and_its_send_is_marked() -> None:
    with pytest.raises(UnmatchedMessageError, match="rank 1 never receives it") as error:
        simulate(dropped(_pair(), 1, f"RECV_WEIGHT{TIE}<-0"))
    assert f">>SEND_WEIGHT{TIE}->1<<" in str(error.value)
    with pytest.raises(UnmatchedMessageError, match="rank 1 never receives that one"):
        simulate(dropped(_pair(), 1, "1RECV_F0<-0@0"))


def test_a_send_to_another_rank_does_not_answer() -> None:
    dag = _programs("0RECV_B0<-1@1 0SEND_F0->1@2", "1RECV_F0<-0@0 1SEND_B0->0@0", "")
    with pytest.raises(UnmatchedMessageError, match="rank 1 waits at 1RECV_F0<-0@0"):
        simulate(dag)


def test_a_collective_that_a_rank_leaves_out_is_found() -> None:
    with pytest.raises(UnmatchedMessageError, match=r"rank 0 waits at CLIP\{0,1\}.*no matching collective"):
        simulate(dropped(_pair(clip=True), 1, "CLIP{0,1}"))


@pytest.mark.parametrize("action", ["SEND_GRAD[w]->7", "RECV_GRAD[w]<-7", "CLIP{0,7}", "CLIP{1}"])
def test_a_peer_that_does_not_exist_is_found(action: str) -> None:
    with pytest.raises(UnmatchedMessageError, match="names one that is not among 0 to 1"):
        simulate(_programs(action, ""))


def test_a_large_grid_is_cut_and_says_so() -> None:
    dag = executable(built(range(12), 64), planned(range(12), [(0, 11)]))
    grid = simulate(dag).format_grid()
    assert len(grid.splitlines()) == 1 + 40 + 1
    assert re.search(r"\(\d+ later rows and 4 of 12 ranks left out\)$", grid)
    assert "0F0" in grid
    assert re.search(r"^time  rank 0 .* rank 7$", grid.splitlines()[0])
    # In an error the rows and the ranks concerned count.
    with pytest.raises(DryRunError) as error:
        simulate(dropped(dag, 10, "10SEND_F60->11@11"))
    grid = str(error.value)
    assert re.search(r"\(\d+ earlier rows and \d+ later rows and 4 of 12 ranks left out\)$", grid)
    assert ">>11RECV_F60<-10@10<<" in grid
    assert "rank 10  " in grid


def test_without_the_cut_the_grid_shows_every_action() -> None:
    dag = executable(built(range(3), 4), planned(range(3), [(0, 2)]))
    grid = simulate(dag).format_grid(max_rows=1000, max_ranks=1000)
    for program in dag.programs:
        assert all(repr(action) in grid for action in program)
    assert "left out" not in grid


def test_1f1b_over_a_v_is_faster_than_gpipe() -> None:
    place = place_stages(8, 4, Placement.V)
    spans = {
        schedule: simulate(insert_transfers(built(place, 16, schedule=schedule))).makespan
        for schedule in Schedule
    }
    assert spans[Schedule.ONE_F_ONE_B] < spans[Schedule.GPIPE]


def test_the_dry_run_is_repeatable() -> None:
    assert simulate(_pair(5)) == simulate(_pair(5))
