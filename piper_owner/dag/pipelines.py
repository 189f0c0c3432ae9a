"""Data parallelism: the pass that lets several equal pipelines train as one, and its rule. Pure.

All pipelines run the same programs on other data, so one TrainingDAG stands for all of them. Its
`Across` nodes are what a rank does with the same rank of the other pipelines. A rank waits there for
ranks that run the same program and stand at the same node, so a cycle of waits would be one
inside a single pipeline already, where the dry run finds it.
"""

from __future__ import annotations

import dataclasses

from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.dag.lower import arrange_tail, split_tail, with_programs
from piper_owner.dag.nodes import Across, AcrossKind, Action, Sync, SyncKind
from piper_owner.errors import DagError

__all__ = ["insert_data_parallel"]


def insert_data_parallel(dag: TrainingDAG, num_pipelines: int, *, one_owner: bool) -> TrainingDAG:
    """Let `num_pipelines` pipelines average their gradients: none of them may step without.

    Each plain bucket gets a DP_ALL_REDUCE before it is stepped. Without `one_owner` a tie gets no node of
    its own: the owners of all pipelines average its combined gradient in their OWNER_STEP, chunk by
    chunk as it comes in. With it, each holder of a tie first reduces its gradient to the lead pipeline
    (DP_REDUCE); the sync nodes run there alone; and each holder that keeps a copy hands the new weights
    to the other pipelines at the very end (DP_BROADCAST). Then gradients are sent in the tail, behind
    that reduction.

    Comes after `insert_ownership` or `insert_all_reduce`, and does nothing for one pipeline.

    Cannot deadlock: a rank goes through its Across nodes in one order in all pipelines, and before the
    first of them it has sent all that its pipeline waits for in the body. Reductions to the lead stand
    before everything that waits for a tied message, and broadcasts behind it.

    Raises DagError for a tie with rows under `one_owner`, and if the DAG has such nodes already.
    """
    if dag.num_pipelines != 1 or any(isinstance(action, Across) for p in dag.programs for action in p):
        raise DagError("insert_data_parallel: the TrainingDAG has several pipelines already; run it once")
    rows = [bucket.name for bucket in dag.buckets if bucket.row_ranks]
    if one_owner and num_pipelines > 1 and rows:
        raise DagError(
            f"the ties {rows} have replicas that keep rows only, and one owner for all pipelines: each "
            "pipeline looks other rows up; plan them with layout='dense' or scope='pipeline'"
        )
    if num_pipelines == 1:
        return dag
    dag = dataclasses.replace(dag, num_pipelines=num_pipelines)
    programs = []
    for rank, program in enumerate(dag.programs):
        body, tail = split_tail(program)
        late: list[Action] = []
        if one_owner:
            late = [a for a in body if isinstance(a, Sync) and a.kind is SyncKind.SEND_GRAD]
            body = [action for action in body if action not in late]
        nodes = [
            Across(kind=kind, bucket=bucket.name)
            for bucket in dag.buckets
            for kind in _kinds(dag, bucket, rank, one_owner=one_owner)
        ]
        programs.append([*body, *arrange_tail(dag, rank, [*late, *tail, *nodes])])
    return with_programs(dag, programs)


def _kinds(dag: TrainingDAG, bucket: Bucket, rank: int, *, one_owner: bool) -> list[AcrossKind]:
    """What `rank` does across the pipelines for `bucket`."""
    if rank not in dag.holders_of(bucket):
        return []
    if bucket.owner is None:
        return [AcrossKind.ALL_REDUCE_GRAD]
    return [AcrossKind.REDUCE_GRAD, AcrossKind.BROADCAST_WEIGHT] if one_owner else []
