"""Ties whose replicas keep rows only, in TrainingDAGs: where the fetch stands, its rules, and the dry run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dag_cases import built, dropped, edited, moved, planned, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.nodes import Action, parse_action
from piper_owner.dag.rules import Level, check_rules
from piper_owner.dag.text import format_dag, parse_dag
from piper_owner.errors import DagError, RuleViolationError
from piper_owner.ownership import Layout
from piper_owner.p2p_nodes import executable, fetch_nodes, insert_ownership
from piper_owner.schedules import Schedule
from piper_owner.simulate import simulate

TIE = "[tie0.stage0]"
RULE = "tie 4: rows before their use"


def good() -> TrainingDAG:
    """Three ranks: stage 0 looks rows up, stage 1 keeps a copy, and stage 2 owns; two microbatches."""
    return executable(built((0, 1, 2), 2), planned((0, 1, 2), [(0, 1, 2)], lookups=[0], owner=2))


def circle(num_ties: int = 2) -> TrainingDAG:
    """Two ranks that serve each other, with that many ties each way."""
    placement = (0, 1, 0, 1)
    ways = [(0, 3), (1, 2)] * num_ties
    return executable(built(placement, 2), planned(placement, ways, lookups=[0, 1]))


def broken(dag: TrainingDAG) -> str:
    with pytest.raises(RuleViolationError) as error:
        check_rules(dag, Level.EXECUTABLE)
    return str(error.value)


def twice(dag: TrainingDAG, rank: int, text: str) -> TrainingDAG:
    def edit(program: list[Action]) -> None:
        at = program.index(parse_action(text))
        program.insert(at, program[at])

    return edited(dag, rank, edit)


def added(dag: TrainingDAG, rank: int, text: str) -> TrainingDAG:
    return edited(dag, rank, lambda program: program.append(parse_action(text)))


def last(dag: TrainingDAG, rank: int, text: str) -> TrainingDAG:
    """The action moved to the end."""
    return added(dropped(dag, rank, text), rank, text)


def test_the_fetch_comes_first_and_no_weight_goes_back() -> None:
    dag = good()
    first, second, third = (texts(dag, rank) for rank in range(3))
    assert first[:2] == [f"SEND_IDS{TIE}->2", f"RECV_ROWS{TIE}<-2"]
    assert third[:2] == [f"RECV_IDS{TIE}<-0", f"SEND_ROWS{TIE}->0"]
    assert not [text for text in second if "IDS" in text or "ROWS" in text]
    assert not [text for text in first if "WEIGHT" in text]
    assert [text for text in third if "WEIGHT" in text] == [f"SEND_WEIGHT{TIE}->1"]
    assert [text for text in third if "GRAD" in text] == [f"RECV_GRAD{TIE}<-0", f"RECV_GRAD{TIE}<-1"]
    simulate(dag)


MUTATIONS: dict[str, Callable[[TrainingDAG], TrainingDAG]] = {
    "no ids": lambda dag: dropped(dag, 0, f"SEND_IDS{TIE}->2"),
    "no rows": lambda dag: dropped(dag, 0, f"RECV_ROWS{TIE}<-2"),
    "not served": lambda dag: dropped(dag, 2, f"SEND_ROWS{TIE}->0"),
    "ids not taken": lambda dag: dropped(dag, 2, f"RECV_IDS{TIE}<-0"),
    "ids twice": lambda dag: twice(dag, 0, f"SEND_IDS{TIE}->2"),
    "rows twice": lambda dag: twice(dag, 0, f"RECV_ROWS{TIE}<-2"),
    "served twice": lambda dag: twice(dag, 2, f"SEND_ROWS{TIE}->0"),
    "fetched after the first use": lambda dag: moved(dag, 0, f"RECV_ROWS{TIE}<-2", "0F1"),
    "asked after the first use": lambda dag: moved(
        moved(dag, 0, f"RECV_ROWS{TIE}<-2", "0F1"), 0, f"SEND_IDS{TIE}->2", f"RECV_ROWS{TIE}<-2"
    ),
    "rows before ids": lambda dag: moved(dag, 0, f"RECV_ROWS{TIE}<-2", f"SEND_IDS{TIE}->2"),
    "served before asked": lambda dag: moved(dag, 2, f"SEND_ROWS{TIE}->0", f"RECV_IDS{TIE}<-0"),
    "served after the step": lambda dag: last(dag, 2, f"SEND_ROWS{TIE}->0"),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_fetch_that_is_not_whole_and_first_is_found(what: str) -> None:
    dag = good()
    check_rules(dag, Level.EXECUTABLE)
    text = broken(MUTATIONS[what](dag))
    assert f"[{RULE}]" in text, text
    assert "[tie0.stage0] with rank" in text


@pytest.mark.parametrize(
    ("rank", "action"),
    [
        (2, f"SEND_WEIGHT{TIE}->0"),
        (0, f"RECV_WEIGHT{TIE}<-2"),
        (1, f"SEND_IDS{TIE}->2"),
        (1, f"RECV_ROWS{TIE}<-2"),
        (2, f"SEND_ROWS{TIE}->1"),
        (2, f"RECV_IDS{TIE}<-1"),
        (0, f"SEND_ROWS{TIE}->2"),
    ],
)
def test_a_node_of_the_other_layout_does_not_belong(rank: int, action: str) -> None:
    text = broken(added(good(), rank, action))
    assert "the tie is owned by rank 2, with replicas on [0, 1], of rows only on [0]" in text


def test_one_gradient_of_a_row_replica() -> None:
    assert "not 2 times" in broken(twice(good(), 0, f"SEND_GRAD{TIE}->2"))
    assert "not 0 times" in broken(dropped(good(), 0, f"SEND_GRAD{TIE}->2"))


@pytest.mark.parametrize("what", MUTATIONS)
def test_the_dry_run_alone_finds_what_cannot_run(what: str) -> None:
    """What only comes too late runs; a message without its other half does not."""
    dag = MUTATIONS[what](good())
    if what in ("fetched after the first use", "asked after the first use", "served before asked"):
        simulate(dag)
        return
    with pytest.raises(DagError):
        simulate(dag)


@pytest.mark.parametrize("num_ties", [1, 2, 3])
def test_ranks_that_serve_each_other_run(num_ties: int) -> None:
    dag = circle(num_ties)
    simulate(dag)
    words = texts(dag, 0)
    sends = [at for at, text in enumerate(words) if text.startswith("SEND_IDS")]
    waits = [at for at, text in enumerate(words) if text.startswith(("RECV_IDS", "RECV_ROWS"))]
    assert len(sends) == num_ties
    assert max(sends) < min(waits), "all ids leave before anything is awaited"


def test_ids_that_leave_only_after_others_came_are_a_deadlock() -> None:
    dag = circle(1)
    for rank, own, other in ((0, "[tie0.stage0]", "[tie1.stage1]"), (1, "[tie1.stage1]", "[tie0.stage0]")):
        peer = 1 - rank
        dag = moved(dag, rank, f"SEND_IDS{own}->{peer}", f"SEND_ROWS{other}->{peer}")
    with pytest.raises(DagError, match=r"RECV_IDS\[tie"):
        simulate(dag)


def test_a_frozen_tie_with_rows_is_refused_and_one_with_copies_is_not() -> None:
    dag = built((0, 1), 2)
    with pytest.raises(DagError, match=r"\['tie0.stage0'\] are frozen .*layout='dense'"):
        insert_ownership(dag, planned((0, 1), [(0, 1)], lookups=[0], frozen=True))
    insert_ownership(dag, planned((0, 1), [(0, 1)], frozen=True))


def test_the_text_of_a_dag_with_rows_parses_back() -> None:
    for dag in (good(), circle()):
        text = format_dag(dag)
        assert parse_dag(text) == dag
        assert "SEND_IDS" in text
    assert "rows" in format_dag(good())


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    placement=st.lists(st.integers(0, 3), min_size=2, max_size=8).map(tuple),
    lookups=st.sets(st.integers(0, 7), min_size=1),
    schedule=st.sampled_from(Schedule),
    clip=st.booleans(),
)
def test_row_replicas_of_any_placement(
    placement: tuple[int, ...], lookups: set[int], schedule: Schedule, clip: bool
) -> None:
    stages = range(len(placement))
    plan = planned(placement, [tuple(stages)], lookups=sorted(lookups), num_ranks=4)
    dag = executable(built(placement, 3, schedule=schedule, num_ranks=4), plan, clip=clip)
    simulate(dag)
    assert parse_dag(format_dag(dag)) == dag
    tie = plan.ties[0]
    all_lookups = {
        rank for rank in set(placement) if all(s in lookups for s in stages if placement[s] == rank)
    }
    expected = all_lookups if all_lookups < set(placement) else set()
    assert set(tie.row_replicas) == expected
    assert {holder.rank for holder in tie.holders if holder.layout is Layout.ROWS} == expected
    for rank in range(4):
        nodes = fetch_nodes(plan.ties, rank)
        assert texts(dag, rank)[: len(nodes)] == [repr(node) for node in nodes]
