"""The edges of a TrainingDAG, derived from its actions; nothing here is stored.

Nodes are integers: those of rank 0 in temporal order, then those of rank 1, and so on.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from piper_owner.dag.index import ABSENT, DagIndex
from piper_owner.dag.nodes import AcrossKind, CollectiveKind, SyncKind
from piper_owner.errors import DagError

if TYPE_CHECKING:
    from piper_owner.dag.graph import TrainingDAG

__all__ = ["data_edges", "offsets", "topological_ids"]


def offsets(dag: TrainingDAG) -> list[int]:
    """The number of the first node of each rank, and, last, the number of nodes."""
    return [0, *accumulate(len(program) for program in dag.programs)]


def data_edges(dag: TrainingDAG) -> list[tuple[int, int]]:
    """Every pair (source, target) where the target uses what the source made.

    Between stages of two ranks the edge runs through the transfer where there is one, and
    directly from producer to consumer where there is none (before transfers are inserted).
    An action that fits nothing (a rule would say so) has no data edge. Pure and local.
    """
    index = DagIndex(dag)
    base = offsets(dag)
    return [*_stage_edges(index, base), *_step_edges(index, base), *_tie_edges(index, base)]


def _link(edges: list[tuple[int, int]], base: list[int], *path: tuple[int, int]) -> None:
    """Join the nodes of `path`, each a (rank, position), leaving out those that are absent."""
    ids = [base[rank] + position for rank, position in path if position != ABSENT]
    if path[0][1] != ABSENT and path[-1][1] != ABSENT:
        edges.extend(pairwise(ids))


def _stage_edges(index: DagIndex, base: list[int]) -> list[tuple[int, int]]:
    dag = index.dag
    edges: list[tuple[int, int]] = []
    microbatches = dag.num_microbatches
    for stage, rank in enumerate(dag.placement):
        for cell in range(stage * microbatches, (stage + 1) * microbatches):
            _link(edges, base, (rank, index.forward[cell]), (rank, index.backward[cell]))
            if index.split[cell]:
                _link(edges, base, (rank, index.backward[cell]), (rank, index.weight[cell]))
    for early, late in dag.stage_edges:
        here, there = dag.placement[early], dag.placement[late]
        edge = index.edge_of.get(early * len(dag.placement) + late, ABSENT)
        for microbatch in range(microbatches):
            a, b = early * microbatches + microbatch, late * microbatches + microbatch
            produced, used = (here, index.forward[a]), (there, index.forward[b])
            back, wanted = (there, index.backward[b]), (here, index.backward[a])
            if edge == ABSENT:
                _link(edges, base, produced, used)
                _link(edges, base, back, wanted)
                continue
            slot = edge * microbatches + microbatch
            _link(
                edges,
                base,
                produced,
                (here, index.send_activation[slot]),
                (there, index.recv_activation[slot]),
                used,
            )
            _link(
                edges,
                base,
                back,
                (there, index.send_input_grad[slot]),
                (here, index.recv_input_grad[slot]),
                wanted,
            )
    return edges


def _step_edges(index: DagIndex, base: list[int]) -> list[tuple[int, int]]:
    """Weight-backwards and combined gradients to collectives; all of these to the steps."""
    dag = index.dag
    edges: list[tuple[int, int]] = []
    stages_of = {bucket.name: bucket.stages for bucket in dag.buckets}
    for rank in range(dag.num_ranks):
        for position, step in index.steps[rank]:
            for stage in stages_of.get(step.bucket, ()):
                if dag.placement[stage] == rank:
                    _link(edges, base, (rank, index.last_weight[stage]), (rank, position))
        reduces = [p for p, c in index.collectives[rank] if c.kind is CollectiveKind.ALL_REDUCE]
        # Gradients that other pipelines have a part in are complete when these are done.
        averaged = [p for p, a in index.across[rank] if a.kind is not AcrossKind.BROADCAST_WEIGHT]
        for position in averaged:
            _link(edges, base, (rank, index.last_weight_on[rank]), (rank, position))
            for target, _ in index.steps[rank]:
                _link(edges, base, (rank, position), (rank, target))
        clips = [p for p, c in index.collectives[rank] if c.kind is CollectiveKind.CLIP]
        owner_steps = [p for p, s in index.syncs[rank] if s.kind is SyncKind.OWNER_STEP]
        ready = [index.last_weight_on[rank]]
        received = [p for p, s in index.syncs[rank] if s.kind is SyncKind.RECV_GRAD]
        for position in clips:
            for source in (*ready, *received, *averaged, *reduces):
                _link(edges, base, (rank, source), (rank, position))
            for target in (*(p for p, _ in index.steps[rank]), *owner_steps):
                _link(edges, base, (rank, position), (rank, target))
        for position in reduces:
            _link(edges, base, (rank, index.last_weight_on[rank]), (rank, position))
            for target, _ in index.steps[rank]:
                _link(edges, base, (rank, position), (rank, target))
    edges.extend(_collective_edges(index, base))
    return edges


def _collective_edges(index: DagIndex, base: list[int]) -> list[tuple[int, int]]:
    """What each rank brings to a collective is used by it on every other rank."""
    edges: list[tuple[int, int]] = []
    places: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for rank, found in enumerate(index.collectives):
        for position, action in found:
            places.setdefault((action.kind, action.bucket, action.ranks), []).append((rank, position))
    for members in places.values():
        for source, _ in members:
            for rank, position in members:
                if rank != source:
                    _link(edges, base, (source, index.last_weight_on[source]), (rank, position))
    return edges


def _tie_edges(index: DagIndex, base: list[int]) -> list[tuple[int, int]]:
    dag = index.dag
    edges: list[tuple[int, int]] = []
    at = {
        (sync.kind, sync.bucket, rank, sync.peer): position
        for rank, found in enumerate(index.syncs)
        for position, sync in found
    }
    for bucket in dag.buckets:
        owner = bucket.owner
        if owner is None:
            continue
        step = (owner, at.get((SyncKind.OWNER_STEP, bucket.name, owner, None), ABSENT))
        for stage in bucket.stages:
            rank = dag.placement[stage]
            own = (
                step
                if rank == owner
                else (rank, at.get((SyncKind.SEND_GRAD, bucket.name, rank, owner), ABSENT))
            )
            _link(edges, base, (rank, index.last_weight[stage]), own)
        for rank in sorted({dag.placement[stage] for stage in bucket.stages} - {owner}):
            sent = (rank, at.get((SyncKind.SEND_GRAD, bucket.name, rank, owner), ABSENT))
            got = (owner, at.get((SyncKind.RECV_GRAD, bucket.name, owner, rank), ABSENT))
            given = (owner, at.get((SyncKind.SEND_WEIGHT, bucket.name, owner, rank), ABSENT))
            taken = (rank, at.get((SyncKind.RECV_WEIGHT, bucket.name, rank, owner), ABSENT))
            for source, target in ((sent, got), (got, step), (step, given), (given, taken)):
                _link(edges, base, source, target)
        for rank in bucket.row_ranks:
            asked = (rank, at.get((SyncKind.SEND_IDS, bucket.name, rank, owner), ABSENT))
            heard = (owner, at.get((SyncKind.RECV_IDS, bucket.name, owner, rank), ABSENT))
            served = (owner, at.get((SyncKind.SEND_ROWS, bucket.name, owner, rank), ABSENT))
            fetched = (rank, at.get((SyncKind.RECV_ROWS, bucket.name, rank, owner), ABSENT))
            for source, target in ((asked, heard), (heard, served), (served, fetched), (served, step)):
                _link(edges, base, source, target)
            for stage in bucket.stages:
                if dag.placement[stage] == rank:
                    _link(edges, base, fetched, (rank, index.first_use[stage]))
    return edges


def topological_ids(dag: TrainingDAG) -> list[int]:
    """All nodes, each after everything it needs; the same list for the same DAG.

    Raises DagError that names the nodes of one cycle when there is no such order.
    """
    base = offsets(dag)
    total = base[-1]
    follows: list[list[int]] = [[] for _ in range(total)]
    waits = [0] * total
    for source, target in data_edges(dag):
        follows[source].append(target)
        waits[target] += 1
    for start, end in pairwise(base):
        for node in range(start, end - 1):
            follows[node].append(node + 1)
            waits[node + 1] += 1
    ready = deque(node for node in range(total) if not waits[node])
    order: list[int] = []
    while ready:
        node = ready.popleft()
        order.append(node)
        for target in follows[node]:
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    if len(order) < total:
        raise DagError(_describe_cycle(dag, base, follows, waits))
    return order


def _describe_cycle(dag: TrainingDAG, base: list[int], follows: list[list[int]], waits: list[int]) -> str:
    # Every node left waits for another node left, so walking backwards must come round.
    before: dict[int, int] = {}
    for node, targets in enumerate(follows):
        if waits[node]:
            for target in targets:
                before.setdefault(target, node)
    node = next(node for node in range(len(waits)) if waits[node])
    seen: dict[int, int] = {}
    path: list[int] = []
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = before[node]
    cycle = path[seen[node] :][::-1]
    names = []
    for member in (*cycle, cycle[0]):
        rank = next(r for r in range(dag.num_ranks) if base[r] <= member < base[r + 1])
        names.append(f"{dag.programs[rank][member - base[rank]]!r} (rank {rank})")
    return (
        f"the TrainingDAG has a cycle of {len(cycle)} actions, so no order can run it: "
        + " -> ".join(names if len(names) <= 13 else [*names[:6], "...", *names[-6:]])
        + "; change the order of these actions in their rank's program"
    )
