"""What keeping a tie one parameter costs, in bytes on the wire and of memory, by the way it is done. Pure.

It also elects owners: `elect` is what `owner="auto"` does.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, assert_never

__all__ = [
    "ALIGNMENT",
    "HEADER_BYTES",
    "ID_BYTES",
    "TABLES",
    "Candidate",
    "Election",
    "HolderCost",
    "TieCost",
    "Way",
    "elect",
    "row_capacity",
    "rows_per_chunk",
    "table_capacity",
    "tie_cost",
]

ALIGNMENT: Final = 64  # elements: at least the widest vector register, of any dtype
HEADER_BYTES: Final = 512
"""Bytes of the header before every message."""
ID_BYTES: Final = 4
"""Bytes of an id on the wire, in a vocabulary of less than 2**31."""
_LEAST_CAPACITY: Final = 64

TABLES: Final[dict[str, tuple[int, int]]] = {
    "GPT-2": (50_257, 768),
    "Llama 3.2 1B": (128_256, 2_048),
    "Qwen3 0.6B": (151_936, 1_024),
    "Gemma 2 2B": (256_000, 2_304),
}
"""(rows, columns) of tied tables: `vocab_size` and `n_embd` or `hidden_size` in the `config.json` of the
models openai-community/gpt2, meta-llama/Llama-3.2-1B, Qwen/Qwen3-0.6B and google/gemma-2-2b."""


class Way(enum.Enum):
    """How an embedding and a head on two devices stay one parameter."""

    ALL_REDUCE = "all-reduce"
    DENSE = "owner, dense"
    ROWS = "owner, rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderCost:
    """Bytes of one holder for one tie. `optimizer` includes master weights."""

    weights: int
    grads: int
    optimizer: int

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.weights + self.grads + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TieCost:
    """One tie between the rank that looks rows up and the one that uses all of it.

    `wire` are the bytes that the busier direction of their link carries in a step: headers, 512
    bytes each, not counted.
    """

    wire: int
    lookup: HolderCost
    dense: HolderCost


def row_capacity(num_rows: int) -> int:
    """The most rows that a compact table has for `num_rows` rows in use."""
    return max(_LEAST_CAPACITY, 2 * num_rows)


def table_capacity(num_rows: int, *, num_ids: int | None = None, before: int = 0) -> int:
    """Rows of a compact table that has `before` rows and needs `num_rows`, for `num_ids` rows in use.

    num_ids: by default `num_rows`; the rows needed may be more, by those that padding takes.

    It stays as it is while it fits, because a change may make torch.compile compile again; else it is
    the power of two that holds the rows, within `row_capacity`.
    """
    limit = row_capacity(num_rows if num_ids is None else num_ids)
    if num_rows <= before <= limit:
        return before
    return min(limit, max(_LEAST_CAPACITY, 1 << (num_rows - 1).bit_length()))


def rows_per_chunk(shape: tuple[int, ...], itemsize: int, chunk_bytes: int) -> int:
    """Rows (of the first dimension) of `shape` in one chunk of about `chunk_bytes`; at least 1.

    A chunk holds a multiple of 64 elements: torch's fused optimizers round the elements that do
    not fill a vector register differently, so a chunk must not end where the whole does not.
    """
    columns = math.prod(shape[1:])
    unit = ALIGNMENT // math.gcd(max(1, columns), ALIGNMENT)
    rows = chunk_bytes // max(1, itemsize * columns)
    return max(unit, rows // unit * unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A rank that could own a tie: the first of its stages that use it, and what is known about it.

    exposed_seconds: of a step, the time that the sync adds if this rank owns; None: not predicted.
    free_bytes: memory that its device has left if it owns; None: not known.
    """

    rank: int
    stage: int
    exposed_seconds: float | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Election:
    """Who owns, and why, in words that complete "rank 0 owns it: "."""

    rank: int
    reason: str


def elect(candidates: Sequence[Candidate], *, step_seconds: float = 0.0) -> Election:
    """The owner: least exposed time, then the most free memory, then the earliest stage and lowest rank.

    Where the exposed time is not predicted, the number of holders in earlier stages stands for it: a
    gradient from a later stage is ready, and the new weights are needed there, while the pipeline
    drains and fills, so that both ways hide; of an earlier stage neither does. Times that differ by
    less than a thousandth of `step_seconds` are equal. `candidates` has at least one.

    Pure: the same on every rank that knows the same.
    """
    predicted = all(each.exposed_seconds is not None for each in candidates)
    unit = max(step_seconds / 1000, 1e-9)

    def exposed(each: Candidate) -> float:
        if predicted and each.exposed_seconds is not None:
            return round(each.exposed_seconds / unit)
        return sum(other.stage < each.stage for other in candidates)

    def key(each: Candidate) -> tuple[float, int, int, int]:
        return exposed(each), -(each.free_bytes or 0), each.stage, each.rank

    best, *others = sorted(candidates, key=key)
    if not others:
        reason = "no other rank can"
    elif exposed(best) < exposed(others[0]):
        if predicted:
            mine, theirs = ((each.exposed_seconds or 0.0) * 1e3 for each in (best, others[0]))
            reason = f"least exposed sync, {mine:.3g} ms a step (rank {others[0].rank}: {theirs:.3g} ms)"
        else:
            reason = f"of the stages that use it {best.stage} is the earliest, where transfers can hide"
    elif (best.free_bytes or 0) > (others[0].free_bytes or 0):
        reason = f"as little exposed sync as rank {others[0].rank}, and more free memory"
    else:
        reason = "the earliest stage, or lowest rank, of those that expose the least sync"
    return Election(rank=best.rank, reason=reason)


def tie_cost(
    way: Way,
    *,
    shape: tuple[int, int],
    num_rows: int,
    itemsize: int = 4,
    state_itemsize: int = 8,
) -> TieCost:
    """The cost of a tie of `shape` (rows, columns) with `num_rows` different rows looked up in a step.

    itemsize: bytes of an element of weights, gradients and messages.
    state_itemsize: bytes of optimizer state for an element, masters included: 8 for Adam in float32,
        12 for Adam with masters in float32 over bfloat16, 0 for plain SGD.

    In the dense layout the rank that looks rows up is taken for the owner. An all-reduce of two ranks
    carries the gradient once in each direction.
    """
    rows, columns = shape
    elements = rows * columns
    owner = HolderCost(
        weights=elements * itemsize, grads=elements * itemsize, optimizer=elements * state_itemsize
    )
    match way:
        case Way.ALL_REDUCE:
            return TieCost(wire=elements * itemsize, lookup=owner, dense=owner)
        case Way.DENSE:
            copy = HolderCost(weights=owner.weights, grads=owner.grads, optimizer=0)
            return TieCost(wire=elements * itemsize, lookup=owner, dense=copy)
        case Way.ROWS:
            compact = row_capacity(num_rows) * columns * itemsize
            replica = HolderCost(weights=compact, grads=compact, optimizer=0)
            wire = num_rows * (columns * itemsize + ID_BYTES)
            return TieCost(wire=wire, lookup=replica, dense=owner)
        case _:
            assert_never(way)
