"""Sees to it that a tie is frozen on all of its holders or on none.

A frozen tie costs no message, so nothing in a step tells a rank that its peer has frozen a
tie, or thawed it, on its own. A rank whose `requires_grad` changed since the last step therefore
tells its peers, before any other message of the step, and expects the same from each of them. A
peer that changed nothing finds the notice where it expects a gradient or weights; a rank that sent
one finds those instead of a notice. Either way somebody sees both sides before a tie is
stepped, and writes it to the board for the others. Steps without a change send nothing more.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from piper_owner.errors import ExchangeError, MessageMismatchError, PeerLostError, PeerTimeoutError
from piper_owner.tied import TiedParameter, header_of, num_rows_with
from piper_owner.transport.early import EarlyReceiver
from piper_owner.transport.messages import Line
from piper_owner.transport.wire import Header, Phase

__all__ = ["Freezing"]


class Freezing:
    """The agreement on `requires_grad` of one rank; arguments as for `exchange.Exchange`."""

    def __init__(self, rank: int, tied: Mapping[str, TiedParameter], lines: Mapping[int, Line]) -> None:
        self.rank, self.tied, self.lines = rank, tied, lines
        self._awaited: dict[int, list[tuple[TiedParameter, Header]]] = {}

    def announce(self, tie: TiedParameter, step: int) -> None:
        """Send the new `tie.is_live` to the peers, and await theirs in `agree`. Local."""
        header = header_of(tie, Phase.FREEZE, step)
        replicas = tie.plan.replicas
        for peer in replicas if tie.plan.owner == self.rank else (tie.plan.owner,):
            self.lines[peer].open(header, present=tie.is_live)
            self._awaited.setdefault(peer, []).append((tie, header))

    @property
    def is_pending(self) -> bool:
        """Whether something was announced that is not agreed on yet."""
        return bool(self._awaited)

    def awaited(self) -> dict[int, list[Header]]:
        """By peer, the notices that will come before anything else."""
        return {peer: [header for _, header in notices] for peer, notices in self._awaited.items()}

    def agree(self, step: int, early: Mapping[int, EarlyReceiver]) -> None:
        """See `Exchange.agree`; `early` has what is received already, by peer."""
        awaited, self._awaited = self._awaited, {}
        views: dict[int, tuple[TiedParameter, bool]] = {}
        confirmed: set[int] = set()
        failed: ExchangeError | None = None
        for peer, line in self.lines.items():
            notices = awaited.get(peer, [])
            due = next((tie for tie in self.tied.values() if peer in tie.due), None)
            expected = [header for _, header in notices]
            if due is not None:
                expected.append(header_of(due, Phase.GRAD, step, num_rows=num_rows_with(due, peer)))
            try:
                for header in expected:
                    _look(line, header, early.get(peer))
                if expected:
                    confirmed.add(peer)
            except MessageMismatchError as error:
                view = self._view(line, header)
                if view is None:
                    raise
                failed, views[peer] = error, view
            except (PeerLostError, PeerTimeoutError) as error:
                failed = failed or error
                if header.phase is Phase.FREEZE:
                    error.args = (f"{error.args[0]}; {_state(notices)} on rank {self.rank}. {_REMEDY}",)
        if views:
            self._raise(views, confirmed, step)
        if failed is not None:
            raise failed

    @contextmanager
    def naming(self, line: Line, expected: Header) -> Iterator[None]:
        """Name tie and ranks where the peer turns out to have frozen or thawed a tie on its own."""
        try:
            yield
        except MessageMismatchError:
            view = self._view(line, expected)
            if view is None:
                raise
            self._raise({line.channel.peer: view}, set(), expected.step)

    def _view(self, line: Line, expected: Header) -> tuple[TiedParameter, bool] | None:
        """The tie that the peer sees otherwise than this rank, and whether it is live there."""
        found = line.refused
        if found is None:
            return None
        ties = list(self.tied.values())  # both ends send their notices in this order
        places = {header_of(t, Phase.FREEZE, 0).as_received().subject: i for i, t in enumerate(ties)}
        wanted = places.get(expected.as_received().subject, len(ties))
        place = places.get(found.subject, len(ties)) if found.phase is Phase.FREEZE else len(ties)
        if expected.phase is Phase.FREEZE and wanted < place:
            return ties[wanted], not ties[wanted].is_live
        return (ties[place], found.present) if place < len(ties) else None

    def _raise(
        self,
        views: Mapping[int, tuple[TiedParameter, bool]],
        confirmed: Container[int],
        step: int,
    ) -> NoReturn:
        tie = min((tie for tie, _ in views.values()), key=lambda tie: tie.plan.name)
        seen = {self.rank: tie.is_live}
        for peer in tie.plan.ranks:
            view = views.get(peer)
            if view is not None and view[0] is tie:
                seen[peer] = view[1]
            elif peer in confirmed:
                seen[peer] = tie.is_live
        live = sorted(rank for rank, is_live in seen.items() if is_live)
        frozen = sorted(rank for rank, is_live in seen.items() if not is_live)
        raise MessageMismatchError(
            f"tie {tie.plan.tie.names}: requires_grad is False on rank {_ranks(frozen)} and True on rank "
            f"{_ranks(live)} in step {step}. {_REMEDY}"
        ) from None


_REMEDY = "Freeze or thaw a tied parameter on every rank that holds it, before the same step"


def _look(line: Line, header: Header, early: EarlyReceiver | None) -> None:
    """Wait for the message of `header`, and take it if it is a notice."""
    message = None if early is None else early.peek(header)
    if early is not None and message is not None:
        assert message.header is not None  # waits for it
        if header.phase is Phase.FREEZE:
            early.take(header)
        return
    if early is not None:
        early.settle()
    line.await_header(header)
    if header.phase is Phase.FREEZE:
        line.receive(header)


def _state(notices: list[tuple[TiedParameter, Header]]) -> str:
    return " and ".join(f"requires_grad of {t.plan.name!r} is now {t.is_live}" for t, _ in notices)


def _ranks(ranks: list[int]) -> str:
    return " and ".join(map(str, ranks))
