"""Fetches rows before a step's first lookup, and serves them: what a replica has that keeps no copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, assert_never

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from piper_owner.dag.nodes import Sync, SyncKind
from piper_owner.ddp import keep_out
from piper_owner.errors import MessageMismatchError, TieError
from piper_owner.ownership import OwnershipPlan, TiePlan
from piper_owner.rows import RowsTable, checked_ids
from piper_owner.stages import NameMap, named_places
from piper_owner.tied import TiedParameter, header_of
from piper_owner.transport.messages import Line
from piper_owner.transport.wire import Header, Phase

__all__ = ["Fetching", "check_row_places", "keep_rows", "value_sources"]

_LARGEST_INT32: Final = 2**31 - 1


class Fetching:
    """The rows of one rank's ties: those it fetches, and those it serves.

    Ids and rows go over `lines`, by peer, which carry nothing else: so they may be fetched whether
    or not a gradient is under way.
    """

    def __init__(self, tied: Mapping[str, TiedParameter], lines: Mapping[int, Line]) -> None:
        self.tied = tied
        self.lines = dict(lines)
        self._requests: dict[str, tuple[torch.Tensor, Phase]] = {}
        self._is_next = False  # whether the fetch that runs is for the step after this one
        self._has_next = False  # whether such a one has run in this step

    def check(self, ids: Sequence[torch.Tensor]) -> None:
        """Raise RowIndexError for an id that this rank cannot fetch. Local; changes nothing."""
        self._unique(ids)

    def _unique(self, ids: Sequence[torch.Tensor]) -> torch.Tensor:
        """The ids, ascending, each once: all of them are in the largest table here, and may be of others."""
        tables = [tie.rows for tie in self.tied.values() if tie.rows is not None]
        if not tables:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        largest = max(tables, key=lambda table: table.num_rows)
        return checked_ids(ids, largest.num_rows, largest.what)

    def want(self, ids: Sequence[torch.Tensor], *, next_step: bool = False) -> None:
        """Let the next SEND_IDS of each tie ask for the rows of `ids`.

        Waits until the peers have all that was sent for earlier fetches. Never in the midst of one, or of a
        step: a peer may take a message only after one of ours that is still to come.
        """
        for line in self.lines.values():
            line.flush()
        self._is_next = next_step
        self._has_next |= next_step
        unique = self._unique(ids)
        for name, tie in self.tied.items():
            if tie.rows is not None:
                within = unique[unique < tie.rows.num_rows]
                new, adds = tie.rows.request(within, next_step=next_step)
                phase = Phase.NEXT_IDS if next_step else Phase.MORE_IDS if adds else Phase.IDS
                self._requests[name] = (new, phase)

    def run(self, node: Sync, step: int) -> None:
        """Run one node of the fetch. Raises ExchangeError when a peer fails."""
        tie, peer = self.tied[node.bucket], node.peer
        assert peer is not None
        match node.kind:
            case SyncKind.SEND_IDS:
                self._send_ids(tie, step)
            case SyncKind.RECV_IDS:
                self._recv_ids(tie, peer, step)
            case SyncKind.SEND_ROWS:
                self._send_rows(tie, peer, step)
            case SyncKind.RECV_ROWS:
                self._recv_rows(tie, step)
            case SyncKind.SEND_GRAD | SyncKind.RECV_GRAD | SyncKind.OWNER_STEP:
                raise AssertionError(f"{node!r} is no part of a fetch")
            case SyncKind.SEND_WEIGHT | SyncKind.RECV_WEIGHT:
                raise AssertionError(f"{node!r} is no part of a fetch")
            case _:
                assert_never(node.kind)

    def end_step(self, nodes: Iterable[Sync], step: int, *, is_next: bool | None = None) -> None:
        """Forget the rows of this step; those requested for the next one come now, if there are any.

        `nodes` are this rank's fetch, of `p2p_nodes.fetch_nodes`; the ids are there already.
        """
        is_next = self._has_next if is_next is None else is_next
        self._has_next = False
        for tie in self.tied.values():
            tie.asked = {rank: (ids, True) for rank, ids in tie.asked_next.items()} if is_next else {}
            tie.asked_next = {}
            tie.served = {rank: tie.served[rank][:0] for rank in tie.served}
            if tie.rows is not None:
                if is_next:
                    tie.rows.take_next()
                else:
                    tie.rows.forget()
        if is_next:
            for node in nodes:
                if node.kind in (SyncKind.SEND_ROWS, SyncKind.RECV_ROWS):
                    self.run(node, step)

    def push(self, tie: TiedParameter, peer: int, rows: torch.Tensor, step: int) -> None:
        """Send `peer` the rows that it has requested for the next step, before the rest is stepped. Local."""
        self.lines[peer].send(header_of(tie, Phase.ROWS, step, num_rows=len(rows)), rows)
        tie.pushed[peer] = rows

    @torch.no_grad()
    def settle_pushed(self, tie: TiedParameter) -> None:
        """Give the owner the bits of what it has sent: the last one may differ where registers end. Local."""
        for peer, rows in tie.pushed.items():
            tie.parameter.index_copy_(0, tie.asked_next[peer].to(tie.parameter.device), rows)

    def forget(self) -> None:
        """Forget every row, here and on the ranks that do the same: the weights have changed. Local."""
        self.end_step((), 0, is_next=False)

    # -- the replica's side

    def _send_ids(self, tie: TiedParameter, step: int) -> None:
        ids, phase = self._requests.pop(tie.plan.name)
        line = self.lines[tie.plan.owner]
        narrow = torch.int32 if tie.plan.shape[0] <= _LARGEST_INT32 else torch.int64
        header = _ids_header(tie, phase, step, ids.numel(), narrow)
        line.send(header, ids.to("cpu", narrow))

    def _recv_rows(self, tie: TiedParameter, step: int) -> None:
        rows = tie.rows
        assert rows is not None
        header = header_of(tie, Phase.ROWS, step, num_rows=rows.num_asked)
        rows.fill(self.lines[tie.plan.owner].receive(header).chunks(rows.ids.device))
        tie.parameter = rows.parameter  # another one where the capacity has changed

    # -- the owner's side

    def _recv_ids(self, tie: TiedParameter, peer: int, step: int) -> None:
        phase = Phase.NEXT_IDS if self._is_next else Phase.IDS
        expected = _ids_header(tie, phase, step, 0, torch.int64)
        incoming = self.lines[peer].receive(
            expected, any_tensor=True, or_phase=None if self._is_next else Phase.MORE_IDS
        )
        sent = incoming.header
        if len(sent.shape) != 1 or sent.dtype not in (torch.int32, torch.int64):
            raise MessageMismatchError(
                f"tie {tie.plan.tie.names}: rank {peer} sent ids of dtype {sent.dtype} and shape {sent.shape}"
            )
        ids = incoming.tensor()
        assert ids is not None
        wide = ids.to(torch.int64)
        checked_ids([wide], tie.plan.shape[0], f"tie {tie.plan.tie.names}: ids that rank {peer} sent")
        if self._is_next:
            tie.asked_next[peer] = wide
        else:
            tie.asked[peer] = (wide, sent.phase is not Phase.MORE_IDS)

    def _send_rows(self, tie: TiedParameter, peer: int, step: int) -> None:
        ids, replaces = tie.asked.pop(peer)
        tie.served[peer] = ids if replaces else torch.cat((tie.served[peer], ids))
        if tie.pushed.pop(peer, None) is not None:
            return
        rows = tie.parameter.detach().index_select(0, ids.to(tie.parameter.device))
        self.lines[peer].send(header_of(tie, Phase.ROWS, step, num_rows=ids.numel()), rows)


def check_row_places(
    stages: Mapping[int, nn.Module],
    tie: TiePlan,
    names: NameMap | None,
    *,
    rank: int,
    has_group: bool = False,
) -> None:
    """Raise TieError unless `stages` of `rank` can have their part in a tie that keeps rows only. Local.

    On a row replica every use is a lookup by an nn.Embedding, in no stage that is wrapped already. On
    another holder that may be, if the owners average over pipelines themselves (`has_group`).
    """
    goes_without = rank in tie.row_replicas
    for stage in stages.values():
        for name, module, leaf in named_places(stage, names):
            if name not in tie.tie.names:
                continue
            wrapped = [m for m in stage.modules() if isinstance(m, DistributedDataParallel | FSDPModule)]
            if wrapped and (goes_without or not has_group):
                kind = "fully_shard" if isinstance(wrapped[0], FSDPModule) else "DistributedDataParallel"
                raise TieError(
                    f"tie {tie.tie.names}: its ranks {list(tie.row_replicas)} are to keep rows only, which "
                    f"{kind} cannot average: each pipeline looks others up; it has the stage of {name!r} on "
                    f"rank {rank} already. Give assign_owners a dp_group= and wrap stages after it, or use "
                    "layout='dense'"
                )
            if not goes_without:
                continue
            if not isinstance(module, nn.Embedding) or leaf != "weight":
                raise TieError(
                    f"tie {tie.tie.names}: {name!r} is to keep rows only, but it is the {leaf} of a "
                    f"{type(module).__name__}, and only an nn.Embedding is known to look rows up; use "
                    "layout='dense', or leave it out of uses="
                )


def value_sources(plan: OwnershipPlan, meta: Sequence[Sequence[str]]) -> dict[str, int]:
    """By tie, the rank whose value is taken; `meta`: the names on the meta device, by rank.

    That is the holder of the first name, or the owner where that one keeps rows and has no value.
    Raises TieError if neither has one.
    """
    sources = {}
    for tie in plan.ties:
        sources[tie.name] = tie.source
        if tie.source in tie.row_replicas and tie.name in meta[tie.source]:
            sources[tie.name] = tie.owner
            if all(name in meta[tie.owner] for name in tie.holder(tie.owner).names):
                raise TieError(
                    f"tie {tie.tie.names}: rank {tie.source}, which holds the first name, and the owner, "
                    f"rank {tie.owner}, have both no value yet; load or initialise one of them first"
                )
    return sources


def keep_rows(
    stages: Mapping[int, nn.Module],
    tied: Mapping[str, TiedParameter],
    rank: int,
    *,
    has_group: bool = False,
) -> None:
    """Give up the copies of `tied` on their row replicas, and serve those on the owners. Local.

    `check_row_places` has passed. `has_group`: owners average over data parallel pipelines; else a stage
    with rows must not be wrapped in DistributedDataParallel.
    """
    for tie in tied.values():
        if rank == tie.plan.owner:
            tie.served = {
                other: torch.empty(0, dtype=torch.int64, device="cpu") for other in tie.plan.row_replicas
            }
        if rank in tie.plan.row_replicas:
            _keep_rows_of(stages, tie, rank, has_group=has_group)
        elif tie.plan.row_replicas and not has_group:
            for stage in stages.values():
                keep_out(stage, [tie.parameter], refuse=True)


def _keep_rows_of(stages: Mapping[int, nn.Module], tie: TiedParameter, rank: int, *, has_group: bool) -> None:
    full, device = tie.parameter, tie.parameter.device
    if full.is_meta:
        real = (p.device for stage in stages.values() for p in stage.parameters() if not p.is_meta)
        device = next(real, torch.device("cpu"))
    for stage in stages.values():
        keep_out(stage, [full], refuse=not has_group)
    modules = dict.fromkeys(module for module, _ in tie.places if isinstance(module, nn.Embedding))
    what = f"tie {tie.plan.tie.names} on rank {rank}"
    tie.rows = RowsTable(list(modules), full, what=what, device=device)
    tie.parameter = tie.rows.parameter


def _ids_header(tie: TiedParameter, phase: Phase, step: int, count: int, dtype: torch.dtype) -> Header:
    return Header(phase=phase, subject=tie.plan.name, step=step, dtype=dtype, shape=(count,))
