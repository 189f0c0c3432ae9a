"""Runs one rank's sync nodes: the only code that moves, adds and steps tied parameters.

A step of one tie, on its owner: the gradients of the replicas come in, are added to the
owner's own in ascending order of rank, the owner steps the only optimizer state, and the new
weights go back. RECV_GRAD only marks a gradient as due. OWNER_STEP then receives, adds, steps and
sends chunk by chunk, so that both directions of the link are busy at once, unless the whole
gradient was needed before (`finalize_grads`) or the optimizer is not element-wise.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import assert_never

import torch

from piper_owner.dag.nodes import Sync, SyncKind
from piper_owner.data_parallel import DataParallel
from piper_owner.errors import ExchangeError
from piper_owner.fetching import Fetching
from piper_owner.freezing import Freezing
from piper_owner.replicas import Replicas
from piper_owner.sharding import like, local_of
from piper_owner.shares import DenseShare, RowsShare, combine
from piper_owner.stats import StepClock, StepStats
from piper_owner.streams import streams_of
from piper_owner.tied import (
    TiedParameter,
    header_of,
    num_rows_with,
    rows_of,
    take_grad,
    wide_dtype,
)
from piper_owner.transport.early import EarlyIncoming, EarlyReceiver
from piper_owner.transport.messages import BytesSent, Incoming, Line, Outgoing
from piper_owner.transport.wire import Header, Phase, row_ranges, rows_per_chunk

__all__ = ["Exchange"]


@dataclass(frozen=True, slots=True)
class _Update:
    """One chunk of the owner's step: rows `start` to `stop` and their combined gradient."""

    start: int
    stop: int
    grad: torch.Tensor


class Exchange:
    """The tied sync of one rank.

    `lines` maps each peer rank to the line of the pair, and `row_lines` to a second one, for ids and
    rows, where one of the two serves the other; `tied` maps the canonical name of each tie held here
    to its `TiedParameter`. All ranks run the sync nodes that `p2p_nodes.insert_ownership` planned, with
    the same `step` number. `side` leads to the same rank of other pipelines; then `reduce_grads` comes
    before the nodes, and `spread_weights` behind them.
    """

    def __init__(
        self,
        rank: int,
        tied: Mapping[str, TiedParameter],
        lines: Mapping[int, Line],
        side: DataParallel | None = None,
        row_lines: Mapping[int, Line] | None = None,
    ) -> None:
        self.rank, self.side = rank, side
        self.tied = dict(tied)
        self.lines = dict(lines)
        self.fetching = Fetching(self.tied, row_lines or {})
        self._replicas = Replicas(rank, self.tied, self.lines)
        self._freezing = Freezing(rank, self.tied, self.lines)
        self._early: dict[int, EarlyReceiver] = {}
        self._begun: int | None = None
        self._sent_early: set[str] = set()
        self.clock = StepClock()

    # -- while the rank still computes; all of it may be left out

    def has_begun(self, step: int) -> bool:
        """Whether `begin` was called for `step`."""
        return self._begun == step

    def begin(self, nodes: Iterable[Sync], step: int) -> None:
        """Let the gradients that `nodes`, this rank's sync of `step`, receive come in from now on.

        Then gradients may be sent early. `run` follows as ever. It costs a buffer for each gradient
        that comes in. Local; does not wait.
        """
        self._begun = step
        self._sent_early.clear()
        if self._is_global:
            return
        expected = self._freezing.awaited()
        for node in nodes:
            if node.kind is SyncKind.RECV_GRAD:
                assert node.peer is not None
                tie = self.tied[node.bucket]
                header = header_of(tie, Phase.GRAD, step, num_rows=num_rows_with(tie, node.peer))
                expected.setdefault(node.peer, []).append(header)
        found = {name: streams_of(tie.parameter.device) for name, tie in self.tied.items()}
        streams = {name: each for name, each in found.items() if each is not None}
        self._early = {
            peer: EarlyReceiver(self.lines[peer], headers, streams) for peer, headers in expected.items()
        }

    def send_early(self, nodes: Iterable[Sync], step: int, *, ready: Container[str]) -> None:
        """Start to send the gradients among `nodes` whose ties are `ready`: nothing adds to them any more.

        A tie goes behind all earlier ones, in the order in which its owner receives; their `run`
        does nothing then. Without a `begin` for `step` it does nothing, nor with one owner for several
        pipelines: there the gradient is reduced first. Local; does not wait.
        """
        if not self.has_begun(step) or self._is_global:
            return
        for node in nodes:
            if node.kind is SyncKind.SEND_GRAD and node.bucket not in self._sent_early:
                if node.bucket not in ready:
                    return
                # A copy: gradients may share storage, and others on this rank may still be scaled.
                self._send_grad(self.tied[node.bucket], step, copy=True)
                self._sent_early.add(node.bucket)

    def _settle(self) -> None:
        """Wait for the gradients that come in early, so that the lines are free for other receives."""
        for early in self._early.values():
            early.settle()

    @property
    def _is_global(self) -> bool:
        return self.side is not None and self.side.is_global

    # -- the step

    def reduce_grads(self, names: Container[str], step: int) -> None:
        """Bring the shares of the ties `names` to the lead pipeline, if that owns them for all."""
        if self.side is None:
            return
        start = time.perf_counter()
        for tie in self.tied.values():
            if tie.plan.name in names:
                tie.is_due = tie.stepper is not None
                if self._is_global:
                    self.side.reduce_grad(tie, step)
        self.clock.grads += time.perf_counter() - start

    def spread_weights(self, names: Container[str], step: int) -> None:
        """Hand the new weights of the ties `names` to the other pipelines, if they have no owner."""
        if self.side is None or not self.side.is_global:
            return
        start = time.perf_counter()
        for tie in self.tied.values():
            if tie.plan.name in names:
                self.side.spread_weight(tie, step)
        self.clock.weights += time.perf_counter() - start

    def run(self, node: Sync, step: int) -> None:
        """Run one sync node of this rank's program. Raises ExchangeError when a peer fails."""
        tie = self.tied[node.bucket]
        match node.kind:
            case SyncKind.SEND_GRAD:
                if self.has_begun(step) and node.bucket in self._sent_early:
                    self._check_sent(tie)
                else:
                    self._send_grad(tie, step, copy=False)
            case SyncKind.RECV_GRAD:
                assert node.peer is not None
                tie.due.append(node.peer)
            case SyncKind.OWNER_STEP:
                self._owner_step(tie, step)
            case SyncKind.SEND_WEIGHT:
                pass  # OWNER_STEP sent the weights, chunk by chunk as it stepped them
            case SyncKind.RECV_WEIGHT:
                self._recv_weight(tie, step)
            case SyncKind.SEND_IDS | SyncKind.RECV_IDS | SyncKind.SEND_ROWS | SyncKind.RECV_ROWS:
                self.fetching.run(node, step)
                if node.kind is SyncKind.RECV_ROWS:
                    # The owner serves a step when it has the gradient of the one before: let that go.
                    self.lines[tie.plan.owner].flush(header_of(tie, Phase.GRAD, step))
            case _:
                assert_never(node.kind)

    def announce(self, tie: TiedParameter, step: int) -> None:
        """Tell the peers of `tie` that it is frozen from `step` on, or that it is not any more.

        It comes before every other message of the step, `begin` included; `agree` follows. Local, but
        where several pipelines have a part in the step it is agreed with those at once.
        """
        self._freezing.announce(tie, step)
        if self.side is not None and (self._is_global or tie.plan.owner == self.rank):
            self.side.agree_on_change(tie, step)

    def agree(self, step: int, *, if_announced: bool = False) -> None:
        """Wait until it is sure that every peer has frozen what this rank has; steps nothing.

        Raises MessageMismatchError naming tie and ranks if not. Without a change here it only waits for
        the first gradient of each replica to be announced, or for nothing `if_announced`.
        """
        if self._freezing.is_pending or not if_announced:
            start = time.perf_counter()
            self._freezing.agree(step, self._early)
            self.clock.grads += time.perf_counter() - start

    def finalize_grads(self, step: int) -> None:
        """Receive all gradients that are due; the sums go into the owners' `.grad` or `wide_grad`.

        Call it when something needs the whole gradient before the step, such as a global norm.
        """
        start = time.perf_counter() - self.clock.grads  # which is counted apart
        self._finalize_grads(step)
        self.clock.ties += time.perf_counter() - self.clock.grads - start

    def _finalize_grads(self, step: int) -> None:
        for tie in self.tied.values():
            if tie.due or tie.is_due:
                assert tie.stepper is not None
                whole = None
                for update in self._combined(tie, step):
                    if whole is None:
                        whole = torch.empty_like(
                            local_of(tie.parameter),
                            dtype=tie.stepper.dtype,
                            memory_format=torch.contiguous_format,
                        )
                    rows_of(whole)[update.start : update.stop] = update.grad.view_as(
                        rows_of(whole)[update.start : update.stop]
                    )
                combined = None if whole is None else like(tie.parameter, whole)
                is_wide = combined is not None and combined.dtype != tie.parameter.dtype
                tie.parameter.grad = None if is_wide else combined
                tie.wide_grad = combined if is_wide else None

    def flush(self) -> None:
        """Wait until every peer has received all that this rank sent."""
        for line in self._every_line():
            line.flush()

    def drain(self) -> None:
        """Wait, behind a flush, until this rank's device is done with all of it as well."""
        for line in self._every_line():
            line.drain()

    def take_bytes_sent(self) -> BytesSent:
        """Bytes sent since the last call, but for `share_values` and `check`."""
        return self.take_stats().sent

    def take_stats(self) -> StepStats:
        """What was moved, and how long it took, since the last call, but for `share_values` and `check`."""
        sent, received = BytesSent(), BytesSent()
        for line in self._counters():
            sent, received = sent + line.sent, received + line.received
            line.sent, line.received = BytesSent(), BytesSent()
        return StepStats(sent=sent, received=received, seconds=self.clock.take())

    def moved_bytes(self) -> tuple[int, int]:
        """Bytes sent and received since the counters were last taken."""
        counters = self._counters()
        return sum(each.sent.total for each in counters), sum(each.received.total for each in counters)

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        before = [(line, line.sent, line.received) for line in self._counters()]
        try:
            yield
        finally:
            for line, sent, received in before:
                line.sent, line.received = sent, received

    def _counters(self) -> list[Line | DataParallel]:
        return [*self._every_line(), *([] if self.side is None else [self.side])]

    def close(self) -> None:
        """Close every line."""
        for line in self._every_line():
            line.close()
        if self.side is not None:
            self.side.close()

    def _every_line(self) -> list[Line]:
        return [*self.lines.values(), *self.fetching.lines.values()]

    # -- the replica's side

    def _send_grad(self, tie: TiedParameter, step: int, *, copy: bool) -> None:
        header = header_of(tie, Phase.GRAD, step, num_rows=num_rows_with(tie, tie.plan.owner))
        grad = take_grad(tie) if tie.wide_grad is None else tie.wide_grad
        tie.parameter.grad = tie.wide_grad = None
        wire = None if grad is None else grad.to(header.dtype)
        self.lines[tie.plan.owner].send(header, wire, copy=copy and wire is grad)

    def _check_sent(self, tie: TiedParameter) -> None:
        if tie.parameter.grad is not None:
            raise ExchangeError(
                f"tie {tie.plan.tie.names}: a backward ran on rank {self.rank} after the schedule had sent "
                "its gradient; run other backwards before the last schedule.step, or leave attach out"
            )

    def _recv_weight(self, tie: TiedParameter, step: int) -> None:
        start = time.perf_counter()
        line = self.lines[tie.plan.owner]
        header = header_of(tie, Phase.WEIGHT, step)
        with self._freezing.naming(line, header):
            incoming = line.receive(header)
        # A copy, not a receive into the parameter: it raises if a graph still needs the old value.
        incoming.into(local_of(tie.parameter))
        tie.is_updated = incoming.present
        # The owner has answered, so it has the gradient: let its memory go. Not more: the owner may
        # wait for others before it takes the weights that this rank has sent it.
        line.flush(header_of(tie, Phase.GRAD, step))
        self.clock.weights += time.perf_counter() - start

    # -- the owner's side

    def _owner_step(self, tie: TiedParameter, step: int) -> None:
        start = time.perf_counter() - self.clock.grads
        stepper = tie.stepper
        assert stepper is not None, f"rank {self.rank} owns {tie.plan.name!r} without a stepper"
        for rank in tie.plan.copies:
            # The weights of the last step may still be on their way. Not more: of two ranks that own
            # ties of each other, each takes the other's gradient only in its own owner step.
            self.lines[rank].flush(header_of(tie, Phase.WEIGHT, step))
        if not stepper.chunkable:
            self._finalize_grads(step)
        outgoing: list[Outgoing] | None = None
        weights = rows_of(tie.parameter)
        for update in self._combined(tie, step, pushes=stepper.chunkable):
            if outgoing is None:
                # Cut as the gradient is, whose dtype may be another one.
                outgoing = self._announce(tie, step, chunk_rows=max(1, update.stop - update.start))
            if stepper.chunkable:
                stepper.step_rows(update.start, update.stop, update.grad)
            elif update.start == 0:
                grad = tie.parameter.grad if tie.wide_grad is None else tie.wide_grad
                assert grad is not None
                stepper.step_whole(grad.to(stepper.dtype))
            for out in outgoing if weights.numel() else ():
                out.put(weights[update.start : update.stop])
        if outgoing is None:
            self._announce(tie, step, chunk_rows=None)
        else:
            stepper.finish()
        self.fetching.settle_pushed(tie)
        tie.parameter.grad = tie.wide_grad = None
        tie.is_updated = outgoing is not None
        self.clock.ties += time.perf_counter() - self.clock.grads - start

    def _announce(self, tie: TiedParameter, step: int, *, chunk_rows: int | None) -> list[Outgoing]:
        """Announce new weights in chunks of `chunk_rows`, or, for None, that there are none."""
        header, present = header_of(tie, Phase.WEIGHT, step), chunk_rows is not None
        lines, device = [self.lines[rank] for rank in tie.plan.copies], tie.parameter.device
        return [line.open(header, present=present, chunk_rows=chunk_rows, device=device) for line in lines]

    def _combined(self, tie: TiedParameter, step: int, *, pushes: bool = False) -> Iterator[_Update]:
        """The combined gradient, chunk by chunk; nothing when every share of it is None.

        With `pushes`, rows that were requested for the next step are stepped and sent before all others.
        """
        own = take_grad(tie) if tie.wide_grad is None else local_of(tie.wide_grad)
        assert tie.stepper is not None
        began = time.perf_counter()
        # What is whole already has been averaged.
        averages = self.side is not None and not self._is_global and tie.is_due
        due, tie.due, tie.is_due = tie.due, [], False
        incoming = {rank: self._grad_from(rank, tie, step) for rank in due}
        shares = {
            rank: self._share(rank, tie, message) for rank, message in incoming.items() if message.present
        }
        present = own is not None or bool(shares)
        if averages and self.side is not None:
            present = self.side.agree(tie, step, present=present)
        self.clock.grads += time.perf_counter() - began
        if not present:
            return
        rows_here = rows_of(tie.parameter)
        if not rows_here.numel():  # such as the last shard of few rows: nothing travels, and it is stepped
            yield _Update(0, len(rows_here), torch.empty_like(rows_here, dtype=tie.stepper.dtype))
            return
        if pushes and tie.asked_next and not averages:
            self._push_rows(tie, step, own, shares)
        header = header_of(tie, Phase.GRAD, step)
        columns = math.prod(header.shape[1:])
        chunk_rows = next(
            (
                message.header.chunk_rows
                for rank, message in incoming.items()
                if message.present and rank not in tie.plan.row_replicas
            ),
            rows_per_chunk(header.shape, header.dtype.itemsize, self._chunk_bytes(tie)),
        )
        for start, stop in row_ranges(header.num_rows, chunk_rows):
            began = time.perf_counter()
            parts = {rank: share.take(start, stop) for rank, share in shares.items()}
            self.clock.grads += time.perf_counter() - began
            mine = None if own is None else rows_of(own)[start:stop]
            if mine is None and not parts:  # another pipeline has one
                mine = torch.zeros_like(rows_here[start:stop], dtype=wide_dtype(tie))
            grad = combine(self.rank, mine, parts, (stop - start, columns))
            if averages and self.side is not None and not tie.is_averaged:
                began = time.perf_counter()
                grad = self.side.average(tie, step, grad)
                self.clock.grads += time.perf_counter() - began
            grad = grad.to(tie.stepper.dtype).view_as(rows_here[start:stop])
            yield _Update(start, stop, grad)
        for share in shares.values():
            share.finish()

    def _push_rows(
        self,
        tie: TiedParameter,
        step: int,
        own: torch.Tensor | None,
        shares: Mapping[int, DenseShare | RowsShare],
    ) -> None:
        """Step the rows that the next step looks up, and send them, while the others are still to come."""
        rows = {rank: share for rank, share in shares.items() if isinstance(share, RowsShare)}
        if len(rows) < len(shares):
            return  # a dense share comes in chunk by chunk, and is not here yet
        assert tie.stepper is not None
        for rank, ids in tie.asked_next.items():
            parts = {other: share.at(ids) for other, share in rows.items()}
            places = ids.to(tie.parameter.device)
            mine = None if own is None else own.index_select(0, places)
            grad = combine(self.rank, mine, parts, (len(ids), math.prod(tie.plan.shape[1:])))
            shaped = grad.to(tie.stepper.dtype).view(-1, *tie.plan.shape[1:])
            if len(ids):
                self.fetching.push(tie, rank, tie.stepper.preview_rows(places, shaped), step)

    def _share(
        self, rank: int, tie: TiedParameter, message: Incoming | EarlyIncoming
    ) -> DenseShare | RowsShare:
        device = tie.parameter.device
        if rank in tie.plan.row_replicas:
            return RowsShare(tie.served[rank], message, device)
        return DenseShare(message, device)

    def _grad_from(self, rank: int, tie: TiedParameter, step: int) -> Incoming | EarlyIncoming:
        return self._receive(rank, header_of(tie, Phase.GRAD, step, num_rows=num_rows_with(tie, rank)))

    def _receive(self, rank: int, header: Header) -> Incoming | EarlyIncoming:
        early = self._early.get(rank)
        message = None if early is None else early.take(header)
        if message is not None:
            return message
        if early is not None:
            early.settle()
        return self.lines[rank].receive(header)

    def _chunk_bytes(self, tie: TiedParameter) -> int:
        sizes = [self.lines[rank].chunk_bytes for rank in tie.plan.replicas]
        return sizes[0] if sizes else max(1, tie.parameter.nbytes)

    # -- before the first step, and between steps

    def share_values(self, *, warn: bool = True, from_owner: bool = False) -> tuple[str, ...]:
        """Give every holder the value of the canonical name's holder, or the owner's; see `replicas`.

        Among pipelines the lead's value goes to all. The ties whose value here was not that of the lead.
        """
        self._settle()
        messages = []
        differed: dict[str, str] = {}
        with self._uncounted():
            if self.side is None or self.side.is_lead:
                messages = self._replicas.share_values(from_owner=from_owner)
            if self.side is not None:
                differed = self.side.share_values(self.tied)
        # Not before: where warnings are errors, the other ranks must not be left waiting.
        for message in (*messages, *differed.values()) if warn else ():
            warnings.warn(message, stacklevel=5)
        return tuple(differed)

    def check(self, step: int) -> bool:
        """Whether every replica holds the owner's value, bit for bit; see `replicas`."""
        self._settle()
        with self._uncounted():
            return self._replicas.check(step)

    def differences(self, step: int) -> dict[str, tuple[float, float]]:
        """By tie, the largest difference in the pipeline, and to the lead pipeline. Raises for neither."""
        self._settle()
        with self._uncounted():
            inside = self._replicas.differences(step)
            across = {} if self.side is None else self.side.differences(self.tied, step)
        return {name: (worst, across.get(name, 0.0)) for name, worst in inside.items()}
