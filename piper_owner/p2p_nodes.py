"""The nodes that keep ties one parameter, and the passes that insert them. Pure.

Canonical order of passes: `insert_bucket_steps`, `insert_ownership`, `insert_clip`,
`insert_data_parallel`, `insert_transfers`; `executable` runs them. Bucket steps and transfers may also
come first: the result is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.dag.lower import (
    arrange_tail,
    insert_bucket_steps,
    insert_clip,
    insert_transfers,
    split_tail,
    with_programs,
)
from piper_owner.dag.nodes import (
    SENDS,
    Action,
    Collective,
    CollectiveKind,
    Compute,
    ComputeKind,
    Sync,
    SyncKind,
    Transfer,
)
from piper_owner.dag.pipelines import insert_data_parallel
from piper_owner.dag.rules import Level, check_rules, level_of
from piper_owner.errors import DagError
from piper_owner.ownership import OwnershipPlan, Scope, TiePlan

__all__ = [
    "Sync",
    "SyncKind",
    "executable",
    "executable_copies",
    "fetch_nodes",
    "insert_all_reduce",
    "insert_ownership",
    "sync_nodes",
]


def insert_ownership(dag: TrainingDAG, plan: OwnershipPlan) -> TrainingDAG:
    """Add the sync of every tie of `plan` that requires a gradient; each becomes a bucket of its own.

    Per rank, before everything else: the fetch of the rows that the step needs, where a replica keeps
    no copy (`fetch_nodes`). Then SEND_GRADs in plan order, each at the earliest point after the last
    weight-backward of the stages that hold the tie (behind the transfers that follow it) and after the
    SEND_GRADs of earlier ties. After all of them, for each tie owned, in plan order: RECV_GRAD from
    every replica (ascending), OWNER_STEP, SEND_WEIGHT to every replica that keeps a copy (ascending).
    At the very end RECV_WEIGHT for the ties of which it keeps a copy, in plan order. A tie on one rank
    gets only its OWNER_STEP. The number of messages does not depend on the number of microbatches.

    Cannot deadlock: sends do not wait. Ids leave before a rank awaits anything, so every owner can
    serve. All gradient sends of a rank precede its first recv of a gradient or a weight, so every
    gradient leaves; hence every owner steps, whoever owns what; hence all weights leave. Ranks may own
    ties of one another in a circle. Messages of a line match because all ranks go through the ties in
    plan order, gradients before weights; ids and rows have a line of their own.

    Raises DagError if the plan does not fit the placement, a name is taken, or the DAG has syncs or a
    clip already (insert_clip comes after this pass).
    """
    ties = [tie for tie in plan.ties if tie.requires_grad]
    frozen = [tie.name for tie in plan.ties if tie.row_replicas and not tie.requires_grad]
    if frozen:
        raise DagError(
            f"the ties {frozen} are frozen and have replicas that keep rows only, which nothing would fetch "
            "in this TrainingDAG; plan them with layout='dense'"
        )
    _check_plan(dag, plan.world_size, ties)
    _refuse_tail_nodes(dag, "insert_ownership")
    owned = tuple(
        Bucket(
            name=tie.name,
            stages=tuple(sorted(stage for holder in tie.holders for stage in holder.stages)),
            owner=tie.owner,
            row_ranks=tie.row_replicas,
        )
        for tie in ties
    )
    dag = dataclasses.replace(dag, buckets=(*dag.buckets, *owned))
    programs = []
    for rank, program in enumerate(dag.programs):
        body, tail = split_tail(_with_gradient_sends(rank, program, ties))
        nodes = [*tail, *_owner_nodes(rank, ties), *_weight_recvs(rank, ties)]
        programs.append((*fetch_nodes(ties, rank), *body, *arrange_tail(dag, rank, nodes)))
    return with_programs(dag, programs)


def insert_all_reduce(dag: TrainingDAG, ties: Iterable[TiePlan]) -> TrainingDAG:
    """Add what other systems do: each holder keeps and steps its own copies, gradients are all-reduced.

    `dag.buckets` has one plain bucket per copy, named by its parameter. Each holder of each tie that
    requires a gradient gets ALL_REDUCE[canonical name]{ranks of the holders}, in the order of `ties`,
    after all weight-backwards and before the steps; with one rank it adds the copies there.

    Cannot deadlock: before its first all-reduce a rank has sent all it ever sends of the pipeline, and
    all ranks go through the ties in one order.

    Raises DagError if a copy has no bucket on its rank, or the DAG has syncs or collectives already.
    """
    wanted = [tie for tie in ties if tie.requires_grad]
    _refuse_tail_nodes(dag, "insert_all_reduce")
    homes = {bucket.name: dag.placement[bucket.stages[0]] for bucket in dag.buckets if bucket.owner is None}
    for tie in wanted:
        for holder in tie.holders:
            for name in holder.names:
                if homes.get(name) != holder.rank:
                    raise DagError(
                        f"tie {tie.name!r}: its copy {name!r} on rank {holder.rank} has no plain bucket "
                        "there; give every copy a bucket of its own"
                    )
    programs = []
    for rank, program in enumerate(dag.programs):
        body, tail = split_tail(program)
        reduces = [
            Collective(kind=CollectiveKind.ALL_REDUCE, ranks=tie.ranks, bucket=tie.name)
            for tie in wanted
            if rank in tie.ranks
        ]
        programs.append((*body, *arrange_tail(dag, rank, [*tail, *reduces])))
    return with_programs(dag, programs)


def executable(
    dag: TrainingDAG, plan: OwnershipPlan, *, clip: bool = False, num_pipelines: int = 1
) -> TrainingDAG:
    """Run all passes on a DAG as built: steps, ownership, the clip and pipelines if wanted, transfers.

    Raises DagError as the passes do; the result keeps every rule of Level.EXECUTABLE.
    """
    dag = insert_ownership(insert_bucket_steps(dag), plan)
    one_owner = plan.scope is Scope.GLOBAL
    return _finish(dag, clip=clip, num_pipelines=num_pipelines, one_owner=one_owner)


def executable_copies(
    dag: TrainingDAG,
    plan: OwnershipPlan,
    *,
    all_reduce: bool,
    clip: bool = False,
    num_pipelines: int = 1,
) -> TrainingDAG:
    """The same for copies that each holder steps: all-reduced, or, as a naive system does, not.

    Raises DagError as the passes do; the result keeps every rule of Level.EXECUTABLE.
    """
    dag = insert_bucket_steps(dag)
    if all_reduce:
        dag = insert_all_reduce(dag, plan.ties)
    return _finish(dag, clip=clip, num_pipelines=num_pipelines, one_owner=False)


def _finish(dag: TrainingDAG, *, clip: bool, num_pipelines: int, one_owner: bool) -> TrainingDAG:
    dag = insert_clip(dag) if clip else dag
    dag = insert_transfers(insert_data_parallel(dag, num_pipelines, one_owner=one_owner))
    if level_of(dag) is not Level.EXECUTABLE:  # else the last pass has checked it
        check_rules(dag, Level.EXECUTABLE)
    return dag


def _with_gradient_sends(rank: int, program: Sequence[Action], ties: Sequence[TiePlan]) -> list[Action]:
    last = {}
    for position, action in enumerate(program):
        if isinstance(action, Compute) and action.kind in (ComputeKind.BACKWARD, ComputeKind.BACKWARD_WEIGHT):
            last[action.stage] = position
    lowered: list[Action] = []
    done = 0
    for tie in ties:
        if rank not in tie.replicas:
            continue
        at = 1 + max((last.get(stage, -1) for stage in tie.holder(rank).stages), default=-1)
        while at < len(program) and _leaves(program[at]):
            at += 1
        if at > done:
            lowered.extend(program[done:at])
            done = at
        lowered.append(Sync(kind=SyncKind.SEND_GRAD, bucket=tie.name, peer=tie.owner))
    lowered.extend(program[done:])
    return lowered


def _leaves(action: Action) -> bool:
    return isinstance(action, Transfer) and action.kind in SENDS


def sync_nodes(ties: Sequence[TiePlan], rank: int) -> tuple[Sync, ...]:
    """The sync of `ties` on `rank` for one step, in the order that `insert_ownership` gives it.

    For a loop that is not a TrainingDAG: the gradient sends come first, then the owner's nodes, then
    the weight recvs.
    """
    sends = (
        Sync(kind=SyncKind.SEND_GRAD, bucket=tie.name, peer=tie.owner) for tie in ties if rank in tie.replicas
    )
    return (*sends, *_owner_nodes(rank, ties), *_weight_recvs(rank, ties))


def fetch_nodes(ties: Sequence[TiePlan], rank: int) -> tuple[Sync, ...]:
    """The fetch of the rows of `ties` on `rank`: what a step begins with, where a replica has no copy.

    The ids of all ties leave first, then this rank serves others, then its own rows arrive.
    """
    sends = [
        Sync(kind=SyncKind.SEND_IDS, bucket=tie.name, peer=tie.owner)
        for tie in ties
        if rank in tie.row_replicas
    ]
    serves = [
        Sync(kind=kind, bucket=tie.name, peer=peer)
        for tie in ties
        if tie.owner == rank
        for peer in tie.row_replicas
        for kind in (SyncKind.RECV_IDS, SyncKind.SEND_ROWS)
    ]
    recvs = [dataclasses.replace(send, kind=SyncKind.RECV_ROWS) for send in sends]
    return (*sends, *serves, *recvs)


def _owner_nodes(rank: int, ties: Sequence[TiePlan]) -> list[Sync]:
    nodes: list[Sync] = []
    for tie in ties:
        if tie.owner != rank:
            continue
        nodes.extend(Sync(kind=SyncKind.RECV_GRAD, bucket=tie.name, peer=peer) for peer in tie.replicas)
        nodes.append(Sync(kind=SyncKind.OWNER_STEP, bucket=tie.name))
        nodes.extend(Sync(kind=SyncKind.SEND_WEIGHT, bucket=tie.name, peer=peer) for peer in tie.copies)
    return nodes


def _weight_recvs(rank: int, ties: Sequence[TiePlan]) -> list[Sync]:
    return [
        Sync(kind=SyncKind.RECV_WEIGHT, bucket=tie.name, peer=tie.owner) for tie in ties if rank in tie.copies
    ]


def _check_plan(dag: TrainingDAG, world_size: int, ties: Sequence[TiePlan]) -> None:
    if world_size != dag.num_ranks:
        raise DagError(
            f"the ownership plan is for {world_size} ranks and the TrainingDAG for {dag.num_ranks}"
        )
    taken = {bucket.name for bucket in dag.buckets}
    for tie in ties:
        if tie.name in taken:
            raise DagError(
                f"tie {tie.name!r}: a bucket of that name exists already; a tie is its own bucket, so "
                "leave its parameter out of the others"
            )
        for holder in tie.holders:
            for stage in holder.stages:
                if stage not in dag.stages_of(holder.rank):
                    raise DagError(
                        f"tie {tie.name!r}: the plan has stage {stage} on rank {holder.rank}, which runs "
                        f"the stages {list(dag.stages_of(holder.rank))}; plan with the placement of the DAG"
                    )


def _refuse_tail_nodes(dag: TrainingDAG, name: str) -> None:
    for rank, program in enumerate(dag.programs):
        for action in program:
            if isinstance(action, Sync | Collective):
                raise DagError(
                    f"{name}: rank {rank} has {action!r} already; run one sync pass, once, and "
                    "insert_clip after it"
                )
