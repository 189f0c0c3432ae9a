"""Rules about steps, ties and collectives. Each yields what is broken; see `rules.RULES`."""

from __future__ import annotations

from collections.abc import Iterator

from piper_owner.dag.graph import Bucket
from piper_owner.dag.index import ABSENT, DagIndex, Violation
from piper_owner.dag.nodes import (
    FETCHES,
    SENDS,
    Action,
    BucketStep,
    Collective,
    CollectiveKind,
    Sync,
    SyncKind,
)

__all__ = [
    "all_reduces_agree",
    "one_clip",
    "one_gradient_send",
    "rows_come_first",
    "step_between",
    "stepped_once",
    "steps_follow_gradients",
    "sync_belongs",
    "tied_messages_match",
]

_OF_OWNER = frozenset(
    {SyncKind.RECV_IDS, SyncKind.SEND_ROWS, SyncKind.RECV_GRAD, SyncKind.OWNER_STEP, SyncKind.SEND_WEIGHT}
)
_NEEDS_A_COPY = frozenset({SyncKind.SEND_WEIGHT, SyncKind.RECV_WEIGHT})


def _ties(index: DagIndex) -> list[tuple[Bucket, int]]:
    return [(bucket, bucket.owner) for bucket in index.dag.buckets if bucket.owner is not None]


def _found(index: DagIndex, rank: int, kind: SyncKind, bucket: str, peer: int | None = None) -> list[int]:
    """Positions on `rank` of the sync nodes of that kind and bucket (with that peer, if given)."""
    return [
        position
        for position, sync in index.syncs[rank]
        if sync.kind is kind and sync.bucket == bucket and peer in (None, sync.peer)
    ]


def _last_weight(index: DagIndex, rank: int, bucket: Bucket) -> int:
    mine = [index.last_weight[stage] for stage in bucket.stages if index.dag.placement[stage] == rank]
    return max(mine, default=ABSENT)


def _late(index: DagIndex, rank: int, action: Action, position: int, last: int) -> Violation:
    return Violation(
        rank=rank,
        action=repr(action),
        what=f"it stands at {position}, before {index.dag.programs[rank][last]!r} at {last}",
        remedy="move it behind that action, which it must follow",
    )


def stepped_once(index: DagIndex) -> Iterator[Violation]:
    """Each bucket is stepped once, on one rank: a plain one where its stage is, a tie by its owner."""
    at: dict[str, list[tuple[int, str, bool]]] = {}
    for rank in range(index.dag.num_ranks):
        for _, step in index.steps[rank]:
            at.setdefault(step.bucket, []).append((rank, repr(step), False))
        for _, sync in index.syncs[rank]:
            if sync.kind is SyncKind.OWNER_STEP:
                at.setdefault(sync.bucket, []).append((rank, repr(sync), True))
    for bucket in index.dag.buckets:
        steps = at.pop(bucket.name, [])
        tied = bucket.owner is not None
        home = index.dag.placement[bucket.stages[0]] if bucket.owner is None else bucket.owner
        right = [step for step in steps if step[0] == home and step[2] == tied]
        for rank, text, _ in [step for step in steps if step not in right] + right[1:]:
            yield Violation(
                rank=rank,
                action=text,
                what=f"bucket {bucket.name!r} is stepped here, but only rank {home} steps it, once",
                remedy="remove this step",
            )
        if not right:
            text = f"OWNER_STEP[{bucket.name}]" if tied else f"STEP[{bucket.name}]"
            yield Violation(
                rank=home,
                action=text,
                what=f"bucket {bucket.name!r} of stages {bucket.stages} is never stepped",
                remedy="add the step",
            )
    for steps in at.values():
        for rank, text, _ in steps:
            yield Violation(
                rank=rank, action=text, what="there is no such bucket", remedy="add it to the buckets"
            )


def steps_follow_gradients(index: DagIndex) -> Iterator[Violation]:
    """A step of a bucket follows all weight-backwards, on its rank, of the bucket's stages."""
    buckets = {bucket.name: bucket for bucket in index.dag.buckets}
    for rank in range(index.dag.num_ranks):
        steps: list[tuple[int, BucketStep | Sync]] = [*index.steps[rank]]
        steps.extend((p, s) for p, s in index.syncs[rank] if s.kind is SyncKind.OWNER_STEP)
        for position, action in steps:
            bucket = buckets.get(action.bucket)
            if bucket is not None:
                last = _last_weight(index, rank, bucket)
                if position < last:
                    yield _late(index, rank, action, position, last)


def sync_belongs(index: DagIndex) -> Iterator[Violation]:
    """A sync node names a tie of the DAG and stands where that tie's owner or replica is."""
    ties = {bucket.name: (bucket, owner) for bucket, owner in _ties(index)}
    for rank in range(index.dag.num_ranks):
        for _, sync in index.syncs[rank]:
            if sync.bucket not in ties:
                what = f"{sync.bucket!r} is not a tie of this DAG"
            elif not _at_home(index, rank, sync, *ties[sync.bucket]):
                bucket, owner = ties[sync.bucket]
                replicas = list(index.dag.replicas_of(bucket))
                what = f"the tie is owned by rank {owner}, with replicas on {replicas}"
                what += f", of rows only on {list(bucket.row_ranks)}" if bucket.row_ranks else ""
            else:
                continue
            yield Violation(
                rank=rank, action=repr(sync), what=what, remedy="remove it: insert_ownership adds them all"
            )


def _at_home(index: DagIndex, rank: int, sync: Sync, bucket: Bucket, owner: int) -> bool:
    replicas = index.dag.replicas_of(bucket)
    if sync.kind in FETCHES:
        replicas = bucket.row_ranks
    elif sync.kind in _NEEDS_A_COPY:
        replicas = tuple(sorted({*replicas} - {*bucket.row_ranks}))
    if sync.kind not in _OF_OWNER:
        return rank in replicas and sync.peer == owner
    return rank == owner and (sync.kind is SyncKind.OWNER_STEP or sync.peer in replicas)


def one_gradient_send(index: DagIndex) -> Iterator[Violation]:
    """Each replica sends its gradient once per step, after its last weight-backward of the tie."""
    for bucket, owner in _ties(index):
        for rank in index.dag.replicas_of(bucket):
            text = f"SEND_GRAD[{bucket.name}]->{owner}"
            found = _found(index, rank, SyncKind.SEND_GRAD, bucket.name)
            if len(found) != 1:
                yield Violation(
                    rank=rank,
                    action=text,
                    what=f"a replica sends its gradient once per step, not {len(found)} times",
                    remedy="send once, whatever the number of microbatches: the gradient accumulates",
                )
            last = _last_weight(index, rank, bucket)
            for position in found:
                if position < last:
                    yield _late(index, rank, index.dag.programs[rank][position], position, last)


def tied_messages_match(index: DagIndex) -> Iterator[Violation]:
    """Each line between two ranks: tied messages are received as they are sent, in the same order."""
    sent: dict[tuple[int, int, bool], list[str]] = {}
    received: dict[tuple[int, int, bool], list[str]] = {}
    for rank in range(index.dag.num_ranks):
        for _, sync in index.syncs[rank]:
            if sync.peer is None:
                continue
            fetches = sync.kind in FETCHES  # ids and rows have a line of their own
            text = f"{sync.kind.value.partition('_')[2]}[{sync.bucket}]"
            if sync.kind in SENDS:
                sent.setdefault((rank, sync.peer, fetches), []).append(text)
            else:
                received.setdefault((sync.peer, rank, fetches), []).append(text)
    for pair in sorted({*sent, *received}):
        given, awaited = [*sent.get(pair, []), "nothing"], [*received.get(pair, []), "nothing"]
        if given != awaited:
            at = next(i for i, (a, b) in enumerate(zip(given, awaited, strict=False)) if a != b)
            yield Violation(
                rank=pair[1],
                action=awaited[at] if awaited[at] == "nothing" else f"RECV_{awaited[at]}<-{pair[0]}",
                what=f"it awaits {awaited[at]} as message {at} of rank {pair[0]}, which sends {given[at]}",
                remedy="give every send one recv, in the same order on both ranks",
            )


def step_between(index: DagIndex) -> Iterator[Violation]:
    """The owner steps once, after all recvs; weights leave after it and arrive after the last use."""
    for bucket, owner in _ties(index):
        program = index.dag.programs[owner]
        steps = _found(index, owner, SyncKind.OWNER_STEP, bucket.name)
        if len(steps) != 1:
            yield Violation(
                rank=owner,
                action=f"OWNER_STEP[{bucket.name}]",
                what=f"the owner steps once per step, not {len(steps)} times",
                remedy="keep one owner step, after the gradients of all replicas",
            )
        for rank in index.dag.replicas_of(bucket):
            grads = _found(index, owner, SyncKind.RECV_GRAD, bucket.name, rank)
            weights = _found(index, owner, SyncKind.SEND_WEIGHT, bucket.name, rank)
            copies = 0 if rank in bucket.row_ranks else 1
            for kind, found, wanted in (("RECV_GRAD", grads, 1), ("SEND_WEIGHT", weights, copies)):
                if len(found) != wanted:
                    yield Violation(
                        rank=owner,
                        action=f"{kind}[{bucket.name}] with rank {rank}",
                        what=f"it stands {len(found)} times in the owner's program",
                        remedy="keep one per replica and step; weights go to replicas that keep a copy",
                    )
            for step in steps:
                for grad in grads:
                    if step < grad:
                        yield _late(index, owner, program[step], step, grad)
                for weight in weights:
                    if weight < step:
                        yield _late(index, owner, program[weight], weight, step)
            if rank not in bucket.row_ranks:
                yield from _arrival(index, bucket, owner, rank)


def _arrival(index: DagIndex, bucket: Bucket, owner: int, rank: int) -> Iterator[Violation]:
    """New weights arrive once, when this step no longer uses the old ones and the gradient left."""
    program = index.dag.programs[rank]
    arrivals = _found(index, rank, SyncKind.RECV_WEIGHT, bucket.name)
    if len(arrivals) != 1:
        yield Violation(
            rank=rank,
            action=f"RECV_WEIGHT[{bucket.name}]<-{owner}",
            what=f"a replica receives the new weights once per step, not {len(arrivals)} times",
            remedy="keep one, at the end: the next step's first use needs it",
        )
    uses = [index.last_use[stage] for stage in bucket.stages if index.dag.placement[stage] == rank]
    last = max([*uses, *_found(index, rank, SyncKind.SEND_GRAD, bucket.name)], default=ABSENT)
    for position in arrivals:
        if position < last:
            yield _late(index, rank, program[position], position, last)


def rows_come_first(index: DagIndex) -> Iterator[Violation]:
    """A replica that keeps rows only fetches them once, before its first use of them.

    It sends ids and then receives rows; the owner receives ids and then sends rows, before it steps.
    """
    for bucket, owner in _ties(index):
        for rank in bucket.row_ranks:
            uses = [index.first_use[stage] for stage in bucket.stages if index.dag.placement[stage] == rank]
            first = min((use for use in uses if use != ABSENT), default=len(index.dag.programs[rank]))
            steps = _found(index, owner, SyncKind.OWNER_STEP, bucket.name)
            until = min(steps, default=len(index.dag.programs[owner]))
            for place, peer, kinds, end in (
                (rank, owner, (SyncKind.SEND_IDS, SyncKind.RECV_ROWS), first),
                (owner, rank, (SyncKind.RECV_IDS, SyncKind.SEND_ROWS), until),
            ):
                found = [_found(index, place, kind, bucket.name, peer) for kind in kinds]
                if [len(each) for each in found] != [1, 1] or not found[0] < found[1] < [end]:
                    yield Violation(
                        rank=place,
                        action=f"{kinds[0].value} and {kinds[1].value} of [{bucket.name}] with rank {peer}",
                        what=f"they stand at {found[0]} and {found[1]}; what needs them comes at {end}",
                        remedy="keep one of each, in this order, before the first use on the replica and "
                        "before the step on the owner",
                    )


def one_clip(index: DagIndex) -> Iterator[Violation]:
    """If any rank clips, each does, once: when its gradients are complete, before any step."""
    every = tuple(range(index.dag.num_ranks))
    clips = [[(p, c) for p, c in found if c.kind is CollectiveKind.CLIP] for found in index.collectives]
    if not any(clips):
        return
    for rank, mine in enumerate(clips):
        if len(mine) != 1 or mine[0][1].ranks != every:
            yield Violation(
                rank=rank,
                action=f"CLIP{{{','.join(map(str, every))}}}",
                what=f"found {[c for _, c in mine]}, but the norm is over all ranks, once",
                remedy="clip on every rank with all ranks named, or on none",
            )
        grads = [p for p, s in index.syncs[rank] if s.kind is SyncKind.RECV_GRAD]
        reduces = [p for p, c in index.collectives[rank] if c.kind is CollectiveKind.ALL_REDUCE]
        last = max([index.last_weight_on[rank], *grads, *reduces])
        owner_steps = [p for p, s in index.syncs[rank] if s.kind is SyncKind.OWNER_STEP]
        first = min([*(p for p, _ in index.steps[rank]), *owner_steps], default=len(index.dag.programs[rank]))
        for position, clip in mine:
            if position < last:
                yield _late(index, rank, clip, position, last)
            if position > first:
                yield _late(index, rank, index.dag.programs[rank][first], first, position)


def all_reduces_agree(index: DagIndex) -> Iterator[Violation]:
    """An all-reduce stands once on exactly its ranks, in one order, between gradients and steps."""
    known = {bucket.name for bucket in index.dag.buckets}
    mine = [[(p, c) for p, c in found if c.kind is CollectiveKind.ALL_REDUCE] for found in index.collectives]
    orders: dict[tuple[int, int], list[Collective]] = {}
    for rank, found in enumerate(mine):
        first = min((p for p, _ in index.steps[rank]), default=len(index.dag.programs[rank]))
        for position, action in found:
            if action.bucket not in known or rank not in action.ranks:
                yield Violation(
                    rank=rank,
                    action=repr(action),
                    what="it names no bucket of the DAG, or does not name this rank",
                    remedy="place it on exactly the ranks that hold a copy",
                )
            for peer in action.ranks:
                orders.setdefault((rank, peer), []).append(action)
            if position < index.last_weight_on[rank]:
                yield _late(index, rank, action, position, index.last_weight_on[rank])
            if position > first:
                yield _late(index, rank, index.dag.programs[rank][first], first, position)
    for (rank, peer), order in sorted(orders.items(), key=lambda item: item[0]):
        if rank == peer:
            if len({(action.bucket, action.ranks) for action in order}) < len(order):
                yield Violation(
                    rank=rank,
                    action=repr(order[-1]),
                    what="an all-reduce stands twice",
                    remedy="keep one of them",
                )
        elif order != orders.get((peer, rank), []):
            other = orders.get((peer, rank), [])
            yield Violation(
                rank=rank,
                action=repr(order[0]),
                what=f"rank {rank} reduces {order} with rank {peer}, which reduces {other}",
                remedy="give both ranks the same all-reduces in the same order",
            )
