"""The rule about several equal pipelines. Yields what is broken; see `rules.RULES`."""

from __future__ import annotations

from collections.abc import Iterator

from piper_owner.dag.index import DagIndex, Violation
from piper_owner.dag.nodes import Across, AcrossKind, Sync, SyncKind

__all__ = ["averaged_across"]

_GRADS = frozenset({AcrossKind.ALL_REDUCE_GRAD, AcrossKind.REDUCE_GRAD})


def averaged_across(index: DagIndex) -> Iterator[Violation]:
    """With several pipelines, what is stepped was averaged over them; with one, nothing is.

    A plain bucket: one DP_ALL_REDUCE where it is stepped. A tie: DP_REDUCE and DP_BROADCAST once on
    each of its holders, or neither on any. Gradients are complete before, and no step, send or
    clip uses them until after; weights are handed on when they are there.
    """
    dag = index.dag
    known = {bucket.name: bucket for bucket in dag.buckets}
    found: dict[tuple[str, AcrossKind], list[int]] = {}
    for rank, nodes in enumerate(index.across):
        for position, node in nodes:
            bucket = known.get(node.bucket)
            plain = node.kind is AcrossKind.ALL_REDUCE_GRAD
            if dag.num_pipelines == 1 or bucket is None or plain is not (bucket.owner is None):
                yield _stray(rank, node, dag.num_pipelines)
                continue
            found.setdefault((node.bucket, node.kind), []).append(rank)
            yield from _place(index, rank, position, node)
    if dag.num_pipelines == 1:
        return
    for bucket in dag.buckets:
        holders = list(dag.holders_of(bucket))
        if bucket.owner is None:
            kinds: tuple[AcrossKind, ...] = (AcrossKind.ALL_REDUCE_GRAD,)
            wanted = [holders]
        else:
            kinds = (AcrossKind.REDUCE_GRAD, AcrossKind.BROADCAST_WEIGHT)
            wanted = [[], holders]
        ranks = [found.get((bucket.name, kind), []) for kind in kinds]
        if ranks[0] not in wanted or ranks.count(ranks[0]) != len(ranks):
            text = " and ".join(f"{kind.value}[{bucket.name}]" for kind in kinds)
            yield Violation(
                rank=holders[0],
                action=text,
                what=f"the ranks {ranks} have it, and the bucket is held by {holders}",
                remedy="insert_data_parallel adds it once on every holder",
            )


def _stray(rank: int, node: Across, num_pipelines: int) -> Violation:
    return Violation(
        rank=rank,
        action=repr(node),
        what=f"{num_pipelines} pipeline(s) run this program, and it is none of its buckets' nodes",
        remedy="remove it: plain buckets have DP_ALL_REDUCE, ties have DP_REDUCE and DP_BROADCAST, and "
        "only among several pipelines",
    )


def _place(index: DagIndex, rank: int, position: int, node: Across) -> Iterator[Violation]:
    """Gradients: behind the last weight-backward, before all that uses them. Weights: behind all."""
    program = index.dag.programs[rank]
    if node.kind in _GRADS:
        before = [index.last_weight_on[rank]]
        after = [p for p, step in index.steps[rank] if step.bucket == node.bucket]
        after += [p for p, sync in index.syncs[rank] if _uses(sync, node)]
        after += [p for p, _ in index.collectives[rank]]
    else:
        before = [p for p, sync in index.syncs[rank] if sync.bucket == node.bucket]
        after = []
    for early, late in [(p, position) for p in before] + [(position, p) for p in after]:
        if late < early:
            yield Violation(
                rank=rank,
                action=repr(program[late]),
                what=f"it stands at {late}, before {program[early]!r} at {early}",
                remedy="move it behind that action, which it must follow",
            )


def _uses(sync: Sync, node: Across) -> bool:
    """Whether `sync` works on the gradient that `node` reduces."""
    return sync.bucket == node.bucket and sync.kind in (SyncKind.SEND_GRAD, SyncKind.OWNER_STEP)
