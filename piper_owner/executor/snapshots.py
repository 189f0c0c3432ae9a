"""Snapshots: a rank's whole state as one block of the host's memory, and which of them make up a job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Holdings", "Recovery", "Shelf", "Snapshot", "pack", "peer_of", "plan_recovery", "unpack"]

_ALIGNMENT: Final = 16
_LENGTH: Final = 8
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole state of one rank after `step` steps; see `pack`. `data` is uint8, one-dimensional."""

    step: int
    data: NDArray[np.uint8] = field(repr=False)


def pack(step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Snapshot:
    """Copy `tensors`, of any device, and `values`, plain JSON, into one new block. Local.

    The block is the length of its head, the head (JSON: names, dtypes, shapes and places), and the
    tensors' bytes, aligned. So it travels as it is, and takes part in no pickle.
    """
    entries: list[tuple[str, str, list[int], int, bool]] = []
    size = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append((name, dtype, list(tensor.shape), size, tensor.device.type == "cpu"))
        size += _aligned(tensor.numel() * tensor.element_size())
    head = json.dumps({"tensors": entries, "values": values}).encode()
    start = _aligned(_LENGTH + len(head))
    data = np.empty(start + size, dtype=np.uint8)
    data[:_LENGTH] = np.frombuffer(len(head).to_bytes(_LENGTH, "little"), dtype=np.uint8)
    data[_LENGTH : _LENGTH + len(head)] = np.frombuffer(head, dtype=np.uint8)
    block = torch.from_numpy(data)[start:]
    with torch.no_grad():
        for (_, _, _, place, _), tensor in zip(entries, tensors.values(), strict=True):
            _view(block, place, tensor.dtype, tensor.shape).copy_(tensor)
    return Snapshot(step=step, data=data)


def unpack(snapshot: Snapshot) -> tuple[dict[str, tuple[Tensor, bool]], dict[str, Any]]:
    """The tensors by name, as views of the block, with whether they were on the CPU; and the values."""
    length = int.from_bytes(snapshot.data[:_LENGTH].tobytes(), "little")
    head = json.loads(snapshot.data[_LENGTH : _LENGTH + length].tobytes())
    block = torch.from_numpy(snapshot.data)[_aligned(_LENGTH + length) :]
    tensors = {
        name: (_view(block, place, _DTYPES[dtype], shape), on_cpu)
        for name, dtype, shape, place, on_cpu in head["tensors"]
    }
    return tensors, head["values"]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _view(block: Tensor, place: int, dtype: torch.dtype, shape: list[int] | torch.Size) -> Tensor:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return block[place : place + size].view(dtype).view(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The steps of the snapshots that one rank has: of itself, and of the rank whose copies it keeps."""

    own: frozenset[int] = frozenset()
    copies: frozenset[int] = frozenset()


class Shelf:
    """The snapshots that one rank has in its memory; they outlast the run that made them.

    `own` and `copies` are by step; a copy is put there when all of it has arrived.
    """

    def __init__(self) -> None:
        self.own: dict[int, Snapshot] = {}
        self.copies: dict[int, Snapshot] = {}

    @property
    def holdings(self) -> Holdings:
        """Which there are."""
        return Holdings(own=frozenset(self.own), copies=frozenset(self.copies))

    def keep_from(self, step: int) -> None:
        """Drop those of earlier steps."""
        self.own = {each: kept for each, kept in self.own.items() if each >= step}
        self.copies = {each: kept for each, kept in self.copies.items() if each >= step}

    def keep_only(self, step: int | None) -> None:
        """Drop those of other steps; all of them for None."""
        self.own = {each: kept for each, kept in self.own.items() if each == step}
        self.copies = {each: kept for each, kept in self.copies.items() if each == step}


def peer_of(rank: int, num_ranks: int) -> int:
    """The rank that keeps the copies of `rank`'s snapshots: the next one, and the first for the last."""
    return (rank + 1) % num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """All ranks go back to `step`; those of `from_peer` get their snapshot from who has the copy."""

    step: int
    from_peer: tuple[int, ...]


def plan_recovery(holdings: Mapping[int, Holdings], num_ranks: int) -> Recovery | None:
    """The latest step of which every rank's state is somewhere, from what the ranks that live have.

    None if there is no such step: no snapshot was whole yet, or a rank is lost and its copy with it. Pure.
    """
    nothing = Holdings()
    steps = {step for held in holdings.values() for step in held.own | held.copies}
    for step in sorted(steps, reverse=True):
        without = tuple(rank for rank in range(num_ranks) if step not in holdings.get(rank, nothing).own)
        if all(step in holdings.get(peer_of(rank, num_ranks), nothing).copies for rank in without):
            return Recovery(step=step, from_peer=without)
    return None
