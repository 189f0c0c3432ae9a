"""What a TrainingDAG computes, found out by running it on symbols.

Neither the rules nor the dry run have a part in it: every rank runs its program on values that say how
they were made, over queues, and at the end has weights that say how they were trained. Two programs
whose weights are made in the same way are the same training (sums being of no order), and one that
reads what is not there, takes another message than its own, or cannot end, is none.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.nodes import (
    FETCHES,
    RECVS,
    SENDS,
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

__all__ = ["Broken", "Terms", "meaning_of"]


K = TypeVar("K", bound=Hashable)


class Broken(Exception):
    """The programs read what is not there, or a message that is not theirs."""


class Unfinished(Broken):
    """A rank waits for ever, or a message is never received: what a dry run is to find as well."""


class Terms:
    """Numbers for values: the same number for what was made in the same way."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def __call__(self, *parts: Hashable) -> int:
        return self._numbers.setdefault(parts, len(self._numbers))


@dataclass
class _Rank:
    """What one rank has in its memory."""

    weights: dict[str, int | None] = field(default_factory=dict)
    grads: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    received: dict[tuple[TransferKind, int, int, int], int] = field(default_factory=dict)
    forwards: dict[tuple[int, int], int] = field(default_factory=dict)
    backwards: dict[tuple[int, int], int] = field(default_factory=dict)
    asked: set[tuple[str, int]] = field(default_factory=set)
    clip: int | None = None


def meaning_of(dag: TrainingDAG, terms: Terms) -> dict[tuple[int, str], int | None]:
    """The weights of every bucket on every rank that has them, after the step.

    Raises Broken when there is no telling, Unfinished when it cannot even end.
    """
    return _Machine(dag, terms).run()


class _Machine:
    def __init__(self, dag: TrainingDAG, terms: Terms) -> None:
        self.dag, self.terms = dag, terms
        self.ranks = [_Rank() for _ in range(dag.num_ranks)]
        self.at = [0] * dag.num_ranks
        self.queues: defaultdict[tuple[int, int, str], deque[tuple[object, int]]] = defaultdict(deque)
        self.barriers: dict[Collective, dict[int, int]] = {}
        self.passed: set[tuple[int, int]] = set()  # (rank, position) of collectives that are done
        self.broken: Broken | None = None
        for bucket in dag.buckets:
            for rank in dag.holders_of(bucket):
                whole = rank not in bucket.row_ranks
                self.ranks[rank].weights[bucket.name] = terms("start", bucket.name) if whole else None

    def run(self) -> dict[tuple[int, str], int | None]:
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(self.dag.programs):
                while self.at[rank] < len(program) and self._step(rank, program[self.at[rank]]):
                    self.at[rank] += 1
                    moved = True
        if any(at < len(program) for at, program in zip(self.at, self.dag.programs, strict=True)):
            raise Unfinished("a rank waits for ever")
        if any(self.queues.values()):
            raise Unfinished("a message is never received")
        if self.broken is not None:  # said only now: a dry run does not look at values
            raise self.broken
        return {
            (number, name): weight
            for number, rank in enumerate(self.ranks)
            for name, weight in rank.weights.items()
            if number not in self.dag.bucket(name).row_ranks
        }

    def _step(self, rank: int, action: Action) -> bool:
        """Run `action`; False to wait."""
        match action:
            case Collective():
                return self._collective(rank, action)
            case Transfer() | Sync(peer=int()) if action.kind in RECVS:
                return self._receive(rank, action)
        try:
            value = self._value(rank, action)
        except Broken as error:
            self.broken, value = self.broken or error, -1
        if isinstance(action, Transfer | Sync) and action.kind in SENDS:
            self.queues[rank, self._peer(action), _line(action)].append((_header(action, rank), value))
        return True

    def _peer(self, action: Transfer | Sync) -> int:
        if action.peer is None or not 0 <= action.peer < self.dag.num_ranks:
            raise Unfinished("there is no such rank")
        return action.peer

    def _value(self, rank: int, action: Action) -> int:
        """What `action` makes, or sends."""
        here = self.ranks[rank]
        match action:
            case Compute():
                self._compute(rank, action)
            case Transfer(kind=kind, stage=stage, microbatch=microbatch):
                made = here.forwards if kind is TransferKind.SEND_ACTIVATION else here.backwards
                return _got(made, (stage, microbatch))
            case BucketStep(bucket=name) | Sync(kind=SyncKind.OWNER_STEP, bucket=name):
                grads = self.terms("sum", *sorted(here.grads.pop(name, Counter()).items()))
                here.weights[name] = self.terms("step", self._weight(here, name), grads, here.clip)
            case Across(kind=AcrossKind.BROADCAST_WEIGHT, bucket=name):
                here.weights[name] = self.terms("in all pipelines", self._weight(here, name))
            case Across(bucket=name):
                total = self.terms("sum", *sorted(here.grads.pop(name, Counter()).items()))
                here.grads[name][self.terms("mean over pipelines", total)] += 1
            case Sync(kind=SyncKind.SEND_GRAD, bucket=name):
                return self.terms("sum", *sorted(here.grads.pop(name, Counter()).items()))
            case Sync(kind=SyncKind.SEND_IDS, bucket=name):
                return self.terms("ids", name, rank)
            case Sync(kind=SyncKind.SEND_WEIGHT, bucket=name):
                return self._weight(here, name)
            case Sync(kind=SyncKind.SEND_ROWS, bucket=name, peer=int(peer)):
                if (name, peer) not in here.asked:
                    raise Broken("rows are sent before anybody asked for them")
                return self._weight(here, name)
            case _:
                raise AssertionError(f"no meaning for {action!r}")
        return -1

    @staticmethod
    def _weight(here: _Rank, name: str) -> int:
        weight = here.weights.get(name)
        if weight is None:
            raise Broken(f"{name} is not here")
        return weight

    def _compute(self, rank: int, action: Compute) -> None:
        here, stage, microbatch = self.ranks[rank], action.stage, action.microbatch
        cell = (stage, microbatch)
        if not (stage < len(self.dag.placement) and microbatch < self.dag.num_microbatches):
            raise Broken("there is no such stage or microbatch")
        buckets = [bucket.name for bucket in self.dag.buckets if stage in bucket.stages]
        used = [self._weight(here, name) for name in buckets]
        if action.kind is ComputeKind.FORWARD:
            values = [
                self._from(here, TransferKind.RECV_ACTIVATION, early, stage, microbatch)
                for early, late in self.dag.stage_edges
                if late == stage
            ]
            here.forwards[cell] = self.terms("F", *cell, *values, *used)
            return
        if action.kind is not ComputeKind.BACKWARD_WEIGHT:
            values = [
                self._from(here, TransferKind.RECV_INPUT_GRAD, late, stage, microbatch)
                for early, late in self.dag.stage_edges
                if early == stage
            ]
            here.backwards[cell] = self.terms("B", *cell, _got(here.forwards, cell), *values, *used)
        if action.kind is not ComputeKind.BACKWARD_INPUT:
            for name in buckets:
                here.grads[name][self.terms("W", name, _got(here.backwards, cell), *used)] += 1

    def _from(self, here: _Rank, kind: TransferKind, other: int, stage: int, microbatch: int) -> int:
        """The value that stage `other` made for `stage`: here, or sent here."""
        if self.dag.placement[other] == self.dag.placement[stage]:
            made = here.forwards if kind is TransferKind.RECV_ACTIVATION else here.backwards
            return _got(made, (other, microbatch))
        return _got(here.received, (kind, other, stage, microbatch))

    def _receive(self, rank: int, action: Transfer | Sync) -> bool:
        here = self.ranks[rank]
        queue = self.queues[self._peer(action), rank, _line(action)]
        if not queue:
            return False
        header, value = queue[0]
        if header != _header(action, rank):
            raise Unfinished("the next message is another one")
        queue.popleft()
        match action:
            case Transfer(kind=kind, stage=stage, peer_stage=other, microbatch=microbatch):
                here.received[kind, other, stage, microbatch] = value
            case Sync(kind=SyncKind.RECV_GRAD, bucket=name):
                here.grads[name][value] += 1
            case Sync(kind=SyncKind.RECV_IDS, bucket=name):
                here.asked.add((name, self._peer(action)))
            case Sync(bucket=name):
                here.weights[name] = value
        return True

    def _collective(self, rank: int, action: Collective) -> bool:
        """The norm of all gradients that will be stepped, once everybody has come."""
        if action.kind is not CollectiveKind.CLIP:
            raise AssertionError(f"no meaning for {action!r}")
        place = (rank, self.at[rank])
        if place in self.passed:
            return True
        if rank not in action.ranks or action.ranks[-1] >= self.dag.num_ranks:
            raise Unfinished("the ranks of a collective")
        waiting = self.barriers.setdefault(action, {})
        waiting[rank] = self.at[rank]
        if len(waiting) < len(action.ranks):
            return False
        del self.barriers[action]
        parts = [
            (bucket.name, tuple(sorted(self.ranks[member].grads[bucket.name].items())))
            for member in action.ranks
            for bucket in self.dag.buckets
            if member == (self.dag.placement[bucket.stages[0]] if bucket.owner is None else bucket.owner)
        ]
        for member in action.ranks:
            self.ranks[member].clip = self.terms("clip", self.ranks[member].clip, *parts)
        self.passed.update(waiting.items())
        return True


def _got(values: Mapping[K, int], key: K) -> int:
    if key not in values:
        raise Broken(f"{key} is not there")
    return values[key]


def _line(action: Transfer | Sync) -> str:
    return "pipeline" if isinstance(action, Transfer) else "rows" if action.kind in FETCHES else "tied"


def _header(action: Transfer | Sync, rank: int) -> object:
    """What a message and its receive agree on: what it is, and for which stages and microbatch."""
    what = action.kind.value.partition("_")[2]
    if isinstance(action, Sync):
        return what, action.bucket
    ends = (action.stage, action.peer_stage)
    return what, action.microbatch, ends if action.kind in SENDS else ends[::-1]
