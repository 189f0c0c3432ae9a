"""What keeping a tie one parameter costs, in bytes on the wire and of memory, by the way it is done. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, assert_never

__all__ = ["TABLES", "HolderCost", "TieCost", "Way", "row_capacity", "tie_cost"]

_LEAST_CAPACITY: Final = 64
_ID_BYTES: Final = 4

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
            wire = num_rows * (columns * itemsize + _ID_BYTES)
            return TieCost(wire=wire, lookup=replica, dense=owner)
        case _:
            assert_never(way)
