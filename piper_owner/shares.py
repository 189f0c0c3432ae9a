"""The shares of a tied gradient, and their sum: dense ones chunk by chunk, rows where they belong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from piper_owner.transport.early import EarlyIncoming
from piper_owner.transport.messages import Incoming

__all__ = ["DenseShare", "RowPart", "RowsShare", "combine"]


@dataclass(frozen=True, slots=True)
class RowPart:
    """Gradients of some rows of a chunk: `places` in it, each once, and their `values`, (rows, columns)."""

    places: torch.Tensor
    values: torch.Tensor


class DenseShare:
    """A replica's gradient of the whole parameter, as it comes in."""

    def __init__(self, message: Incoming | EarlyIncoming, device: torch.device) -> None:
        self._chunks: Iterator[tuple[int, int, torch.Tensor]] = message.chunks(device)

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Its rows `start` to `stop`, (rows, columns): the next chunk."""
        begin, end, rows = next(self._chunks)
        assert (begin, end) == (start, stop), "every rank cuts a tie into the same chunks"
        return rows

    def finish(self) -> None:
        """All rows have been taken."""
        next(self._chunks, None)


class RowsShare:
    """A replica's gradient of the rows `ids` (int64, each once), which come in at the first `take`."""

    def __init__(self, ids: torch.Tensor, message: Incoming | EarlyIncoming, device: torch.device) -> None:
        self._ids, self._order = torch.sort(ids)
        self._message = message
        self._device = device
        self._rows: torch.Tensor | None = None

    def take(self, start: int, stop: int) -> RowPart:
        """Those of its rows that are among `start` to `stop`."""
        rows = self._receive()
        first, last = torch.searchsorted(self._ids, torch.tensor([start, stop], device="cpu")).tolist()
        places = self._ids[first:last] - start
        return RowPart(self._there(places), rows.index_select(0, self._there(self._order[first:last])))

    def at(self, ids: torch.Tensor) -> RowPart:
        """Those of its rows that are among `ids`, by their places there."""
        rows = self._receive()
        mine = torch.isin(ids, self._ids)
        order = self._order[torch.searchsorted(self._ids, ids[mine])]
        return RowPart(self._there(mine.nonzero().view(-1)), rows.index_select(0, self._there(order)))

    def finish(self) -> None:
        """All rows have been taken."""
        self._receive()  # of a parameter without elements nobody has taken any

    def _receive(self) -> torch.Tensor:
        if self._rows is not None:
            return self._rows
        header = self._message.header
        whole = torch.empty(header.shape, dtype=header.dtype, device=self._device)
        whole = whole.view(header.num_rows, math.prod(header.shape[1:]))
        for start, stop, rows in self._message.chunks(self._device):
            whole[start:stop] = rows
        self._rows = whole
        return whole

    def _there(self, places: torch.Tensor) -> torch.Tensor:
        return places.to(self._device, non_blocking=True)  # the host does not wait, and may let go of it


def combine(
    rank: int,
    own: torch.Tensor | None,
    parts: Mapping[int, torch.Tensor | RowPart],
    size: tuple[int, int],
) -> torch.Tensor:
    """The sum of the owner's rows and the replicas', in ascending rank, in float32 or wider.

    own: (rows, ...) of rank `rank`, or None; parts: by rank, (rows, columns) or some of these; size: the
    (rows, columns) of the sum. There is at least one share. Writes to staging buffers only: a gradient
    may share storage with another parameter's.
    """
    shares: dict[int, torch.Tensor | RowPart] = dict(parts)
    if own is not None:
        shares[rank] = own.reshape(size)
    order = sorted(shares)
    if len(order) > 1 and isinstance(shares[order[0]], RowPart):
        order[:2] = order[1::-1]  # the same bits, since addition commutes, and nothing to fill with zeros
    dtype = torch.float32
    for share in shares.values():
        dtype = torch.promote_types(dtype, share.values.dtype if isinstance(share, RowPart) else share.dtype)
    first = shares[order[0]]
    if isinstance(first, RowPart):
        total, borrowed = torch.zeros(size, dtype=dtype, device=first.values.device), False
    else:
        total = first.to(dtype)
        borrowed = total is first
        order = order[1:]
    for other in order:
        share = shares[other]
        if isinstance(share, RowPart):
            total = total.clone() if borrowed else total
            total.index_add_(0, share.places, share.values.to(dtype))
            borrowed = False
            continue
        wide = share.to(dtype)
        if not borrowed:
            total.add_(wide)
        elif other != rank and wide is share:
            total, borrowed = wide.add_(total), False  # the same bits: addition commutes
        else:
            total, borrowed = total + wide, False
    return total
