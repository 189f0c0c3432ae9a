"""Passes that lower a TrainingDAG: one pass, one function, TrainingDAG in, TrainingDAG out.

The canonical order is `insert_bucket_steps`, `insert_ownership` or `insert_all_reduce` (both in
`piper_owner.p2p_nodes`, which also has `executable` to run them all), `insert_clip`,
`insert_data_parallel` (in `piper_owner.dag.pipelines`), `insert_transfers`. Other orders give the same
DAG, but `insert_clip` comes after the syncs.

After its last compute and transfer a rank has a *tail*, which every pass keeps in this order:
gradients to the lead pipeline, gradient sends, averages over pipelines, all-reduces, (gradient recvs
and the clip, if there is one,) early owner steps, plain steps, late owner steps, weight recvs, weights
to the other pipelines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never

from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.nodes import (
    FETCHES,
    Across,
    AcrossKind,
    Action,
    BucketStep,
    Collective,
    CollectiveKind,
    Compute,
    ComputeKind,
    Sync,
    SyncKind,
    Transfer,
    TransferKind,
)
from piper_owner.dag.rules import check_rules, level_of
from piper_owner.errors import DagError

__all__ = [
    "arrange_tail",
    "early_ties",
    "insert_bucket_steps",
    "insert_clip",
    "insert_transfers",
    "split_tail",
    "with_programs",
]


def insert_transfers(dag: TrainingDAG) -> TrainingDAG:
    """Add the SENDs and RECVs of activations and of their gradients, for stage edges between ranks.

    Each SEND stands right after its producer. Before an action that needs message m of rank p stand
    the RECVs of all messages of p, not received yet, up to and including m, in p's send order.

    That cannot deadlock if the computes alone could not: sends do not wait, and p sent all those
    messages no later than m, which the action had to await anyhow. Receive order equals send order
    for every pair, whatever the schedule.

    Raises DagError if there are transfers already or a producer is missing.
    """
    _refuse(dag, Transfer, "insert_transfers")
    plan = _TransferPlan(dag)
    programs: list[list[Action]] = [[] for _ in dag.programs]
    for rank, program in enumerate(dag.programs):
        for action in program:
            programs[rank].append(action)
            if type(action) is Compute:
                programs[rank].extend(plan.sends_after(rank, action))
    return with_programs(dag, [plan.with_recvs(rank, program) for rank, program in enumerate(programs)])


class _TransferPlan:
    """The messages between ranks: who makes them, in which order they leave, who needs them.

    A message is the number `(back * num_microbatches + microbatch) * num_edges + edge`.
    """

    def __init__(self, dag: TrainingDAG) -> None:
        self.dag = dag
        self.inputs: list[list[tuple[int, int]]] = [[] for _ in dag.placement]
        self.outputs: list[list[tuple[int, int]]] = [[] for _ in dag.placement]
        for edge, (early, late) in enumerate(dag.stage_edges):
            if dag.placement[early] != dag.placement[late]:
                self.inputs[late].append((edge, early))
                self.outputs[early].append((edge, late))
        # By source * num_ranks + target: the recvs, in the order of the sends.
        self.queues: dict[int, list[Transfer]] = {}
        # By message: its place in the queue of its pair.
        self.places: dict[int, int] = {}

    def _message(self, action: Compute, back: bool, edge: int) -> int:
        return (back * self.dag.num_microbatches + action.microbatch) * len(self.dag.stage_edges) + edge

    def sends_after(self, rank: int, action: Compute) -> Iterator[Transfer]:
        """What leaves `rank` once `action` is done; the matching recvs join the queue of the pair."""
        match action.kind:
            case ComputeKind.FORWARD:
                send, recv, targets = TransferKind.SEND_ACTIVATION, TransferKind.RECV_ACTIVATION, self.outputs
            case ComputeKind.BACKWARD | ComputeKind.BACKWARD_INPUT:
                send, recv, targets = TransferKind.SEND_INPUT_GRAD, TransferKind.RECV_INPUT_GRAD, self.inputs
            case ComputeKind.BACKWARD_WEIGHT:
                return
            case _:
                assert_never(action.kind)
        back = action.kind is not ComputeKind.FORWARD
        stage, microbatch = action.stage, action.microbatch
        for edge, other in targets[stage]:
            peer = self.dag.placement[other]
            queue = self.queues.setdefault(rank * self.dag.num_ranks + peer, [])
            self.places[self._message(action, back, edge)] = len(queue)
            queue.append(Transfer(kind=recv, stage=other, microbatch=microbatch, peer_stage=stage, peer=rank))
            yield Transfer(kind=send, stage=stage, microbatch=microbatch, peer_stage=other, peer=peer)

    def with_recvs(self, rank: int, program: Sequence[Action]) -> list[Action]:
        """`program` with the recvs that each of its computes needs, once all sends are known."""
        lowered: list[Action] = []
        received = [0] * self.dag.num_ranks
        for action in program:
            if type(action) is Compute and action.kind is not ComputeKind.BACKWARD_WEIGHT:
                back = action.kind is not ComputeKind.FORWARD
                for edge, other in (self.outputs if back else self.inputs)[action.stage]:
                    source = self.dag.placement[other]
                    place = self.places.get(self._message(action, back, edge))
                    if place is None:
                        raise DagError(
                            f"{action!r} on rank {rank} needs microbatch {action.microbatch} of stage "
                            f"{other}, which rank {source} never computes; add it there"
                        )
                    if place >= received[source]:
                        queue = self.queues[source * self.dag.num_ranks + rank]
                        lowered.extend(queue[received[source] : place + 1])
                        received[source] = place + 1
            lowered.append(action)
        return lowered


def insert_bucket_steps(dag: TrainingDAG) -> TrainingDAG:
    """Add a step for each plain bucket, on the rank of its stage, after all of the rank's computes.

    Cannot deadlock: a step waits for nothing, and none stands before a send of the pipeline, so no
    other rank waits for an optimizer.

    Raises DagError if there are plain steps already.
    """
    _refuse(dag, BucketStep, "insert_bucket_steps")
    steps: list[list[BucketStep]] = [[] for _ in dag.programs]
    for bucket in dag.buckets:
        if bucket.owner is None:
            steps[dag.placement[bucket.stages[0]]].append(BucketStep(bucket=bucket.name))
    programs = []
    for rank, program in enumerate(dag.programs):
        body, tail = split_tail(program)
        programs.append([*body, *arrange_tail(dag, rank, [*tail, *steps[rank]])])
    return with_programs(dag, programs)


def insert_clip(dag: TrainingDAG) -> TrainingDAG:
    """Add one CLIP over all ranks on every rank: its gradients are complete, and nothing is stepped.

    Gradient recvs move before it, in their order. Cannot deadlock: before its clip a rank waits for
    pipeline messages and gradients only, and every rank sends all of those before its own clip.

    Raises DagError if there is a clip already.
    """
    clip = Collective(kind=CollectiveKind.CLIP, ranks=tuple(range(dag.num_ranks)))
    if any(clip == action for program in dag.programs for action in split_tail(program)[1]):
        raise DagError("insert_clip: the TrainingDAG has a CLIP already; run this pass once")
    programs = []
    for rank, program in enumerate(dag.programs):
        body, tail = split_tail(program)
        programs.append([*body, *arrange_tail(dag, rank, [*tail, clip])])
    return with_programs(dag, programs)


def split_tail(program: Sequence[Action]) -> tuple[Sequence[Action], Sequence[Action]]:
    """`program` up to its last compute or transfer, and what comes after."""
    end = len(program)
    while end and not isinstance(program[end - 1], Compute | Transfer):
        end -= 1
    return program[:end], program[end:]


def early_ties(dag: TrainingDAG, rank: int) -> frozenset[str]:
    """The ties that `rank` owns and steps before its plain buckets.

    Those whose owner runs the earliest stage of all holders: the gradients of the replicas came
    long ago, and the sooner the weights leave, the more of their way hides behind the plain
    steps. Ties are received in one order, so only those before the first other tie count.
    """
    early: list[str] = []
    for bucket in dag.buckets:
        if bucket.owner != rank:
            continue
        if dag.placement[bucket.stages[0]] != rank:
            break
        early.append(bucket.name)
    return frozenset(early)


def arrange_tail(dag: TrainingDAG, rank: int, tail: Iterable[Action]) -> list[Action]:
    """`tail` in the order that the module's docstring gives; equals keep their order."""
    actions = list(tail)
    # Looked for only where it matters: a long pipeline has thousands of ranks without a tie.
    early = early_ties(dag, rank) if any(isinstance(a, Sync) for a in actions) else frozenset()
    clipped = any(isinstance(a, Collective) and a.kind is CollectiveKind.CLIP for a in actions)

    def phase(action: Action) -> int:
        match action:
            case Compute() | Transfer():
                return 0
            case Sync(kind=kind) if kind in FETCHES:
                return 0
            case Across(kind=AcrossKind.REDUCE_GRAD):
                return 1
            case Sync(kind=SyncKind.SEND_GRAD):
                return 2
            case Across(kind=AcrossKind.ALL_REDUCE_GRAD):
                return 3
            case Collective(kind=CollectiveKind.ALL_REDUCE):
                return 4
            case Sync(kind=SyncKind.RECV_GRAD) if clipped:
                return 5
            case Collective(kind=CollectiveKind.CLIP):
                return 6
            case BucketStep():
                return 8
            case Sync(kind=SyncKind.RECV_WEIGHT):
                return 10
            case Across(kind=AcrossKind.BROADCAST_WEIGHT):
                return 11
            case Sync(bucket=bucket):
                return 7 if bucket in early else 9
            case _:
                raise AssertionError(f"no place in a tail for {action!r}")

    return sorted(actions, key=phase)


def _refuse(dag: TrainingDAG, family: type[Transfer] | type[BucketStep], name: str) -> None:
    for rank, program in enumerate(dag.programs):
        for action in program:
            if type(action) is family:
                raise DagError(f"{name}: rank {rank} has {action!r} already; run this pass once")


def with_programs(dag: TrainingDAG, programs: Iterable[Iterable[Action]]) -> TrainingDAG:
    """`dag` with other programs, checked at the level that they claim: how every pass ends."""
    lowered = dataclasses.replace(dag, programs=tuple(map(tuple, programs)))
    check_rules(lowered, level_of(lowered))
    return lowered
