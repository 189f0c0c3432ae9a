"""Dry run of all ranks of a TrainingDAG, without processes: can it finish, and when does what run?

Sends take no time of the sender and arrive after their flight time; recvs block; messages of an
ordered pair of ranks are first in, first out, pipeline transfers and tied sync each on a channel
of their own; a collective is a barrier over its ranks. What a rank does depends only on its
own program and the messages that reach it, so one run stands for every interleaving. Equal
pipelines side by side run the same programs in step, so one of them stands for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final, assert_never

from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.nodes import (
    FETCHES,
    Across,
    Action,
    BucketStep,
    Collective,
    Compute,
    ComputeKind,
    Sync,
    SyncKind,
    Transfer,
    TransferKind,
)
from piper_owner.errors import DeadlockError, DryRunError, MisorderedMessageError, UnmatchedMessageError

__all__ = ["DryRun", "Event", "Timeline", "counterpart", "dry_run", "simulate", "unit_duration"]

_ROWS: Final = 40
_COLUMNS: Final = 8
_ROWS_BEHIND: Final = 5

_FLOW: Final = {
    TransferKind.SEND_ACTIVATION: TransferKind.RECV_ACTIVATION,
    TransferKind.SEND_INPUT_GRAD: TransferKind.RECV_INPUT_GRAD,
}
_TIED: Final = {
    SyncKind.SEND_IDS: SyncKind.RECV_IDS,
    SyncKind.SEND_ROWS: SyncKind.RECV_ROWS,
    SyncKind.SEND_GRAD: SyncKind.RECV_GRAD,
    SyncKind.SEND_WEIGHT: SyncKind.RECV_WEIGHT,
}


def unit_duration(action: Action) -> float:
    """Unit times: a forward 1, a backward 2, each half of it 1, a step 1, messages and collectives 0."""
    match action:
        case Compute(kind=kind):
            return 2.0 if kind is ComputeKind.BACKWARD else 1.0
        case BucketStep():
            return 1.0
        case Sync(kind=sync):
            return 1.0 if sync is SyncKind.OWNER_STEP else 0.0
        case Transfer() | Collective() | Across():
            return 0.0
        case _:
            assert_never(action)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One action of a rank; a recv or collective starts when the rank begins to wait for it."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When each rank runs what; `starts` and `ends` go with the actions of `programs`.

    Of a rank that could not go on they are shorter: what it did not reach is missing, and the action
    at which it waits has a start and no end.
    """

    programs: tuple[tuple[Action, ...], ...]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """When the last rank ends."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    def idle(self, rank: int) -> float:
        """How long `rank` waits or has ended before the last rank ends."""
        return self.makespan - self.busy[rank]

    def events(self, rank: int) -> tuple[Event, ...]:
        """What `rank` runs, in temporal order."""
        rows = zip(self.programs[rank], self.starts[rank], self.ends[rank], strict=False)
        return tuple(Event(action=action, start=start, end=end) for action, start, end in rows)

    def format_grid(
        self,
        *,
        max_rows: int = _ROWS,
        max_ranks: int = _COLUMNS,
        wrong: Set[tuple[int, int]] = frozenset(),
    ) -> str:
        """The rank x time grid: a column per rank, a row per time at which something starts.

        The cells `wrong`, each a rank and a position in its program, are marked `>>like this<<` where
        they started. Where the grid is larger than `max_rows` lines or `max_ranks` columns it shows
        the first ones, or those around the first wrong cell, and says so.
        """
        bad = sorted({rank for rank, position in wrong if position < len(self.starts[rank])})
        order = bad + [rank for rank in range(len(self.programs)) if rank not in bad]
        focus = bad[0] if bad else None
        return _format_grid(self.programs, self.starts, wrong, order, max_rows, max_ranks, focus)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """How far the ranks come, and why no further.

    `error` is None where all of them end. `wrong` are cells, each a rank and a position in its
    program: actions that wait for ever, or a send that nobody receives.
    """

    timeline: Timeline
    error: DryRunError | None
    wrong: frozenset[tuple[int, int]]


def dry_run(dag: TrainingDAG, durations: Callable[[Action], float] = unit_duration) -> DryRun:
    """As `simulate`, but what is wrong is returned beside what ran, and nothing is raised."""
    state = _DryRun(dag, durations)
    error = None
    try:
        state.run()
    except DryRunError as raised:
        error = raised
    return DryRun(timeline=state.timeline(), error=error, wrong=frozenset(state.marked))


def simulate(dag: TrainingDAG, durations: Callable[[Action], float] = unit_duration) -> Timeline:
    """Run every rank's program to its end. Pure and local.

    `durations` gives the time of each action in any unit; for a send it is the flight time of the
    message, for a recv the time to take it in once it is there.

    Raises DeadlockError, UnmatchedMessageError or MisorderedMessageError when a rank cannot go on
    or a message is left over. The message says who waits for whom and prints the rank x time
    grid of what ran, with the cells that are stuck marked `>>like this<<`.
    """
    ran = dry_run(dag, durations)
    if ran.error is not None:
        raise ran.error
    return ran.timeline


class _DryRun:
    """The state of all ranks: the next action, the clock, and what each of them waits for."""

    def __init__(self, dag: TrainingDAG, durations: Callable[[Action], float]) -> None:
        self.dag = dag
        self.programs = dag.programs
        self.durations = durations
        ranks = range(dag.num_ranks)
        self.clock = [0.0 for _ in ranks]
        self.busy = [0.0 for _ in ranks]
        self.starts: list[list[float]] = [[] for _ in ranks]
        self.ends: list[list[float]] = [[] for _ in ranks]
        # Messages under way, by channel and ordered pair: arrival, position in the sender's program.
        self.queues: dict[int, deque[tuple[float, int]]] = {}
        self.awaits: list[int | None] = [None for _ in ranks]
        self.barriers: dict[Collective, list[int]] = {}
        self.wrong: list[int] = []
        self.work = deque(ranks)
        # Rank and position of what is wrong.
        self.marked: set[tuple[int, int]] = set()

    def run(self) -> None:
        while self.work:
            self._advance(self.work.popleft())
        if any(len(ends) < len(program) for ends, program in zip(self.ends, self.programs, strict=True)):
            raise self._stuck()
        for key, queue in sorted(self.queues.items()):
            if queue:
                raise self._left_over(key, queue[0][1])

    def timeline(self) -> Timeline:
        return Timeline(
            programs=self.programs,
            starts=tuple(map(tuple, self.starts)),
            ends=tuple(map(tuple, self.ends)),
            busy=tuple(self.busy),
        )

    def _key(self, source: int, target: int, action: Transfer | Sync) -> int:
        line = 0 if type(action) is Transfer else 2 if action.kind in FETCHES else 1
        return (source * self.dag.num_ranks + target) * 3 + line

    def _advance(self, rank: int) -> None:
        """Run `rank` until it ends or has to wait."""
        program, starts, ends = self.programs[rank], self.starts[rank], self.ends[rank]
        while len(ends) < len(program):
            action = program[len(ends)]
            if len(starts) == len(ends):  # else it waited here, and goes on
                starts.append(self.clock[rank])
            if isinstance(action, Collective):
                if not self._join(rank, action):
                    return
                continue
            if isinstance(action, Transfer | Sync) and action.peer is not None:
                if self._is_send(action):
                    self._send(rank, len(ends), action, action.peer)
                    ends.append(self.clock[rank])
                    continue
                if not self._receive(rank, action, action.peer):
                    return
            self._spend(rank, action)

    def _spend(self, rank: int, action: Action) -> None:
        duration = self.durations(action)
        self.clock[rank] += duration
        self.busy[rank] += duration
        self.ends[rank].append(self.clock[rank])

    @staticmethod
    def _is_send(action: Transfer | Sync) -> bool:
        kind = action.kind
        return kind is TransferKind.SEND_ACTIVATION or kind is TransferKind.SEND_INPUT_GRAD or kind in _TIED

    def _send(self, rank: int, position: int, action: Transfer | Sync, peer: int) -> None:
        if not 0 <= peer < len(self.awaits):
            raise self._stray_peer(rank, action)
        key = self._key(rank, peer, action)
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = deque()
        queue.append((self.clock[rank] + self.durations(action), position))
        if self.awaits[peer] == key:
            self.awaits[peer] = None
            self.work.append(peer)

    def _receive(self, rank: int, action: Transfer | Sync, peer: int) -> bool:
        """Take the message that `action` awaits; False if it is not there, or another one is."""
        if not 0 <= peer < len(self.awaits):
            raise self._stray_peer(rank, action)
        key = self._key(peer, rank, action)
        queue = self.queues.get(key)
        if not queue:
            self.awaits[rank] = key
            return False
        arrival, position = queue[0]
        if not _matches(self.programs[peer][position], action, rank):
            self.wrong.append(rank)
            return False
        queue.popleft()
        if arrival > self.clock[rank]:
            self.clock[rank] = arrival
        return True

    def _join(self, rank: int, action: Collective) -> bool:
        """Wait for the other ranks of a collective; the last to come lets all of them go on."""
        if rank not in action.ranks or action.ranks[-1] >= self.dag.num_ranks:
            raise self._stray_peer(rank, action)
        members = self.barriers.setdefault(action, [])
        members.append(rank)
        if len(members) < len(action.ranks):
            return False
        del self.barriers[action]
        together = max(self.clock[member] for member in members)
        for member in members:
            self.clock[member] = together
            self._spend(member, action)
            if member != rank:
                self.work.append(member)
        return True

    # Why it cannot go on.

    def _stray_peer(self, rank: int, action: Action) -> DryRunError:
        return self._error(
            UnmatchedMessageError,
            f"unmatched: rank {rank} runs {action!r}, which leaves this rank out or names one that is not "
            f"among 0 to {self.dag.num_ranks - 1}; correct its ranks",
            [rank],
        )

    def _stuck(self) -> DryRunError:
        if self.wrong:
            return self._wrong_message(min(self.wrong, key=lambda rank: (self.clock[rank], rank)))
        stuck = [r for r, ends in enumerate(self.ends) if len(ends) < len(self.programs[r])]
        for rank in stuck:
            action = self.programs[rank][len(self.ends[rank])]
            for peer in self._waits_for(rank):
                if not any(_answers(other, action, rank) for other in self._remaining(peer)):
                    return self._error(
                        UnmatchedMessageError,
                        f"unmatched: {self._wait(rank)}, whose program has no matching "
                        f"{'collective' if isinstance(action, Collective) else 'send'} left; add it, or "
                        f"remove {action!r}",
                        [rank, peer],
                    )
        circle = self._circle(stuck[0])
        words = "; ".join(self._wait(rank) for rank in circle[:_COLUMNS])
        if len(circle) > _COLUMNS:
            words += f"; ... {len(circle)} ranks in all"
        return self._error(
            DeadlockError, f"deadlock: {words}; no rank of this circle can go on: reorder one of them", circle
        )

    def _wrong_message(self, rank: int) -> DryRunError:
        action = self.programs[rank][len(self.ends[rank])]
        peer = self._waits_for(rank)[0]
        key = self._key(peer, rank, action) if isinstance(action, Transfer | Sync) else 0
        queue = self.queues[key]
        head = self.programs[peer][queue[0][1]]
        under_way = [self.programs[peer][position] for _, position in queue]
        facts = f"rank {rank} awaits {action!r} from rank {peer}, whose next message to it is {head!r}"
        if not any(_matches(other, action, rank) for other in (*under_way, *self._remaining(peer))):
            return self._error(
                UnmatchedMessageError,
                f"unmatched: {facts}, and which never sends what is awaited",
                [rank, peer],
            )
        if not any(_matches(head, other, rank) for other in self._remaining(rank)):
            return self._error(
                UnmatchedMessageError,
                f"unmatched: {facts}; rank {rank} never receives that one",
                [rank, peer],
            )
        return self._error(
            MisorderedMessageError,
            f"misordered: {facts}; messages of a pair are first in, first out: receive in the "
            "order of the sends",
            [rank, peer],
        )

    def _left_over(self, key: int, position: int) -> DryRunError:
        source, target = divmod(key // 3, self.dag.num_ranks)
        return self._error(
            UnmatchedMessageError,
            f"unmatched: rank {source} sends {self.programs[source][position]!r} and rank {target} never "
            "receives it; add the recv, or remove the send",
            [source, target],
            {(source, position)},
        )

    def _remaining(self, rank: int) -> Sequence[Action]:
        return self.programs[rank][len(self.ends[rank]) :] if 0 <= rank < self.dag.num_ranks else ()

    def _waits_for(self, rank: int) -> list[int]:
        """The ranks whose doing would let `rank` go on."""
        match self.programs[rank][len(self.ends[rank])]:
            case Transfer(peer=peer):
                return [peer]
            case Sync(peer=int(peer)):
                return [peer]
            case Collective(ranks=ranks) as action:
                return [peer for peer in ranks if peer not in self.barriers[action]]
            case action:
                raise AssertionError(f"{action!r} does not wait")

    def _wait(self, rank: int) -> str:
        position = len(self.ends[rank])
        peers = ", ".join(map(str, self._waits_for(rank)[:_COLUMNS]))
        return f"rank {rank} waits at {self.programs[rank][position]!r} (action {position}) for rank {peers}"

    def _circle(self, rank: int) -> list[int]:
        path: list[int] = []
        while rank not in path:
            path.append(rank)
            rank = self._waits_for(rank)[0]
        return path[path.index(rank) :]

    def _error(
        self,
        error: type[DryRunError],
        text: str,
        ranks: Sequence[int],
        marks: set[tuple[int, int]] | None = None,
    ) -> DryRunError:
        """The error, with the grid, of a large one the part around the first of `ranks`, those concerned."""
        blocked = {
            (rank, len(ends))
            for rank, ends in enumerate(self.ends)
            if len(ends) < len(self.programs[rank]) and len(self.starts[rank]) > len(ends)
        }
        self.marked = marked = (marks or set()) | blocked
        every = range(self.dag.num_ranks)
        order = [r for r in ranks if r in every] + [r for r in every if r not in ranks]
        grid = _format_grid(self.programs, self.starts, marked, order, _ROWS, _COLUMNS, focus=ranks[0])
        return error(f"{text}\n{grid}")


def counterpart(action: Action, rank: int) -> tuple[int, Action] | None:
    """Who takes what `action` of `rank` sends, and by which action; None for one that sends nothing."""
    if type(action) is Transfer and (move := _FLOW.get(action.kind)) is not None:
        return action.peer, Transfer(
            kind=move,
            stage=action.peer_stage,
            microbatch=action.microbatch,
            peer_stage=action.stage,
            peer=rank,
        )
    if type(action) is Sync and action.peer is not None and (sync := _TIED.get(action.kind)) is not None:
        return action.peer, Sync(kind=sync, bucket=action.bucket, peer=rank)
    return None


def _matches(send: Action, recv: Action, receiver: int) -> bool:
    """Whether `recv`, an action of rank `receiver`, takes what `send` (of recv's peer) sends."""
    if type(send) is Transfer and type(recv) is Transfer:
        return (
            _FLOW.get(send.kind) is recv.kind
            and send.microbatch == recv.microbatch
            and send.stage == recv.peer_stage
            and send.peer_stage == recv.stage
            and send.peer == receiver
        )
    if type(send) is Sync and type(recv) is Sync:
        return _TIED.get(send.kind) is recv.kind and send.bucket == recv.bucket and send.peer == receiver
    return False


def _answers(action: Action, waiting: Action, rank: int) -> bool:
    """Whether `action`, of the rank waited for, would let `rank` go on at `waiting`."""
    return action == waiting if isinstance(waiting, Collective) else _matches(action, waiting, rank)


def _format_grid(
    programs: Sequence[Sequence[Action]],
    starts: Sequence[Sequence[float]],
    marked: Set[tuple[int, int]],
    order: Sequence[int],
    max_rows: int,
    max_ranks: int,
    focus: int | None = None,
) -> str:
    """The grid of what started, columns of `order` first; a large one is cut at its first rows.

    With a `focus` it is cut to the rows before that rank's marked cell, and a few behind it.
    """
    shown = sorted(order[:max_ranks])
    cells: dict[float, dict[int, list[str]]] = {}
    for rank in shown:
        for position, start in enumerate(starts[rank]):
            text = repr(programs[rank][position])
            if (rank, position) in marked:
                text = f">>{text}<<"
            cells.setdefault(start, {}).setdefault(rank, []).append(text)
    lines = [["time", *(f"rank {rank}" for rank in shown)]]
    body = [line for time in sorted(cells) for line in _rows(time, cells[time], shown)]
    first = 0
    if focus is not None:
        column = 1 + shown.index(focus)
        at = next((i for i, line in enumerate(body) if line[column].startswith(">>")), 0)
        first = min(max(0, at + _ROWS_BEHIND + 1 - max_rows), max(0, len(body) - max_rows))
    lines.extend(body[first : first + max_rows])
    widths = [max(len(line[column]) for line in lines) for column in range(len(shown) + 1)]
    text = "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    hidden = (
        (first, f"{first} earlier rows"),
        (max(0, len(body) - first - max_rows), f"{len(body) - first - max_rows} later rows"),
        (len(order) - len(shown), f"{len(order) - len(shown)} of {len(order)} ranks"),
    )
    notes = [note for count, note in hidden if count]
    return text + (f"\n({' and '.join(notes)} left out)" if notes else "")


def _rows(time: float, cells: Mapping[int, list[str]], shown: Sequence[int]) -> Iterator[list[str]]:
    for line in range(max(map(len, cells.values()))):
        columns = [cells.get(rank, []) for rank in shown]
        yield [f"{time:g}" if line == 0 else "", *(c[line] if line < len(c) else "" for c in columns)]
