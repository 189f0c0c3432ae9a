"""The graph: derived edges, topological order, and what does not fit together."""

from __future__ import annotations

import dataclasses

import pytest
from dag_cases import Case, built, cases, edited, moved, planned
from hypothesis import given, settings

from piper_owner.dag.graph import Bucket, EdgeKind, TrainingDAG
from piper_owner.dag.lower import insert_transfers
from piper_owner.dag.nodes import parse_action
from piper_owner.errors import DagError
from piper_owner.p2p_nodes import executable, executable_copies
from piper_owner.schedules import Schedule


def _edges(dag: TrainingDAG, kind: EdgeKind) -> set[tuple[str, str]]:
    return {
        (f"{edge.source.rank}:{edge.source.action!r}", f"{edge.target.rank}:{edge.target.action!r}")
        for edge in dag.edges()
        if edge.kind is kind
    }


def test_temporal_edges_join_consecutive_actions_of_a_rank() -> None:
    assert _edges(built((0, 1), 1), EdgeKind.TEMPORAL) == {("0:0F0", "0:0B0"), ("1:1F0", "1:1B0")}


def test_data_edges_as_built_go_from_stage_to_stage() -> None:
    assert _edges(built((0, 1), 1), EdgeKind.DATA) == {
        ("0:0F0", "0:0B0"),
        ("1:1F0", "1:1B0"),
        ("0:0F0", "1:1F0"),
        ("1:1B0", "0:0B0"),
    }


def test_data_edges_between_ranks_run_through_the_transfers() -> None:
    assert _edges(insert_transfers(built((0, 1), 1)), EdgeKind.DATA) == {
        ("0:0F0", "0:0B0"),
        ("1:1F0", "1:1B0"),
        ("0:0F0", "0:0SEND_F0->1@1"),
        ("0:0SEND_F0->1@1", "1:1RECV_F0<-0@0"),
        ("1:1RECV_F0<-0@0", "1:1F0"),
        ("1:1B0", "1:1SEND_B0->0@0"),
        ("1:1SEND_B0->0@0", "0:0RECV_B0<-1@1"),
        ("0:0RECV_B0<-1@1", "0:0B0"),
    }


def test_a_split_backward_feeds_its_weight_half_and_the_stage_before() -> None:
    dag = TrainingDAG(
        placement=(0, 0),
        num_ranks=1,
        num_microbatches=1,
        stage_edges=((0, 1),),
        buckets=(),
        programs=(tuple(map(parse_action, ["0F0", "1F0", "1I0", "0I0", "1W0", "0W0"])),),
    )
    assert _edges(dag, EdgeKind.DATA) == {
        ("0:0F0", "0:0I0"),
        ("0:1F0", "0:1I0"),
        ("0:0I0", "0:0W0"),
        ("0:1I0", "0:1W0"),
        ("0:0F0", "0:1F0"),
        ("0:1I0", "0:0I0"),
    }


def test_a_tie_flows_from_the_last_backward_to_the_replica_and_back() -> None:
    dag = executable(built((0, 1), 2), planned((0, 1), [(0, 1)]))
    name = "[tie0.stage0]"
    assert _edges(dag, EdgeKind.DATA) >= {
        ("1:1B1", f"1:SEND_GRAD{name}->0"),
        (f"1:SEND_GRAD{name}->0", f"0:RECV_GRAD{name}<-1"),
        (f"0:RECV_GRAD{name}<-1", f"0:OWNER_STEP{name}"),
        ("0:0B1", f"0:OWNER_STEP{name}"),
        (f"0:OWNER_STEP{name}", f"0:SEND_WEIGHT{name}->1"),
        (f"0:SEND_WEIGHT{name}->1", f"1:RECV_WEIGHT{name}<-0"),
        ("0:0B1", "0:STEP[stage0]"),
    }


def test_a_collective_needs_the_gradients_of_every_rank_of_it() -> None:
    dag = executable(built((0, 1), 1), planned((0, 1), []), clip=True)
    assert _edges(dag, EdgeKind.DATA) >= {
        ("0:0B0", "0:CLIP{0,1}"),
        ("0:0B0", "1:CLIP{0,1}"),
        ("1:1B0", "0:CLIP{0,1}"),
        ("0:CLIP{0,1}", "0:STEP[stage0]"),
    }
    tied = executable(built((0, 1), 1), planned((0, 1), [(0, 1)]), clip=True)
    assert _edges(tied, EdgeKind.DATA) >= {
        ("0:RECV_GRAD[tie0.stage0]<-1", "0:CLIP{0,1}"),
        ("0:CLIP{0,1}", "0:OWNER_STEP[tie0.stage0]"),
    }


@settings(max_examples=60, deadline=None)
@given(cases(max_ranks=5, max_stages=8, max_microbatches=4))
def test_the_topological_order_keeps_every_edge(case: Case) -> None:
    dag = executable(case.build(), case.plan, clip=True)
    order = {(node.rank, node.action): i for i, node in enumerate(dag.topological_order())}
    assert len(order) == sum(map(len, dag.programs))
    for edge in dag.edges():
        source, target = (order[(node.rank, node.action)] for node in (edge.source, edge.target))
        assert source < target
    assert dag.topological_order() == dataclasses.replace(dag).topological_order()


def test_a_cycle_is_named() -> None:
    dag = moved(insert_transfers(built((0, 1), 1)), 0, "0RECV_B0<-1@1", "0F0")
    with pytest.raises(DagError, match="cycle") as error:
        dag.topological_order()
    for part in ("0RECV_B0<-1@1 (rank 0)", "0SEND_F0->1@1 (rank 0)", "1F0 (rank 1)", "change the order"):
        assert part in str(error.value)


def test_a_long_cycle_is_shortened() -> None:
    gpipe = built((0,), 16, schedule=Schedule.GPIPE)
    dag = edited(gpipe, 0, lambda program: program.append(program.pop(0)))
    with pytest.raises(DagError, match=r"cycle of 17 actions.* -> \.\.\. -> "):
        dag.topological_order()


def test_stages_holders_and_replicas() -> None:
    dag = executable(built((0, 1, 2, 1, 0), 1), planned((0, 1, 2, 1, 0), [(0, 1, 3)]))
    tie = dag.bucket("tie0.stage0")
    assert tie == Bucket(name="tie0.stage0", stages=(0, 1, 3), owner=0)
    assert dag.stages_of(1) == (1, 3)
    assert dag.holders_of(tie) == (0, 1)
    assert dag.replicas_of(tie) == (1,)
    assert dag.replicas_of(dag.bucket("stage2")) == ()
    with pytest.raises(KeyError):
        dag.bucket("missing")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_microbatches": 0}, "at least one rank, stage, microbatch and pipeline"),
        ({"placement": ()}, "at least one rank, stage, microbatch and pipeline"),
        ({"placement": (0, 2)}, "stage 1 is placed on rank 2, but the ranks are 0 to 1"),
        ({"placement": (0, -1)}, "stage 1 is placed on rank -1"),
        ({"programs": ((),)}, "1 programs for 2 ranks"),
        ({"stage_edges": ((0, 0),)}, "stage edge 0->0"),
        ({"stage_edges": ((0, 2),)}, "stage edge 0->2"),
        ({"stage_edges": ((0, 1), (0, 1))}, "listed twice"),
        ({"buckets": (Bucket(name="", stages=(0,)),)}, "each bucket has a name"),
        ({"buckets": (Bucket(name="w", stages=(0,)), Bucket(name="w", stages=(1,)))}, "no two have the same"),
        ({"buckets": (Bucket(name="w", stages=()),)}, "list at least one"),
        ({"buckets": (Bucket(name="w", stages=(1, 0), owner=0),)}, "ascending"),
        ({"buckets": (Bucket(name="w", stages=(7,)),)}, "stage 7 is not one of 0 to 1"),
        ({"buckets": (Bucket(name="w", stages=(0, 1)),)}, "has no owner"),
        ({"buckets": (Bucket(name="w", stages=(0,), owner=1),)}, "owned by rank 1, which runs none"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DagError, match=message):
        dataclasses.replace(built((0, 1), 1), **changes)  # type: ignore[arg-type]


def test_actions_that_fit_nothing_have_temporal_edges_only() -> None:
    dag = edited(built((0, 1), 1), 0, lambda program: program.append(parse_action("9F9")))
    assert ("0:0B0", "0:9F9") in _edges(dag, EdgeKind.TEMPORAL)
    assert not any("9F9" in end for edge in _edges(dag, EdgeKind.DATA) for end in edge)


def test_copies_need_the_all_reduce_before_their_step() -> None:
    plan = planned((0, 1), [(0, 1)])
    copies = tuple(Bucket(name=f"tie0.stage{stage}", stages=(stage,)) for stage in (0, 1))
    dag = executable_copies(dataclasses.replace(built((0, 1), 1), buckets=copies), plan, all_reduce=True)
    assert _edges(dag, EdgeKind.DATA) >= {
        ("0:0B0", "1:ALL_REDUCE[tie0.stage0]{0,1}"),
        ("1:ALL_REDUCE[tie0.stage0]{0,1}", "1:STEP[tie0.stage1]"),
    }
