"""How large the checks are: as a language model of today on a GPU, tiny on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["FULL", "TINY", "Sizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of every check.

    vocab to steps: the tied model of two stages and its training. owner_rows x owner_columns: the table
    whose step is timed, in float32, and chunk_bytes the chunks that it is cut into. touched_rows: those
    that are gathered and added to. order_rows: the table of the test of streams, owner_columns wide.
    delay_cycles: how long a kernel is held up there. rounds: of each timing.
    """

    vocab: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    microbatches: int
    microbatch_size: int
    steps: int
    owner_rows: int
    owner_columns: int
    chunk_bytes: tuple[int, ...]
    touched_rows: int
    order_rows: int
    delay_cycles: int
    rounds: int

    @property
    def num_tokens(self) -> int:
        """Tokens of a step."""
        return self.microbatches * self.microbatch_size * self.sequence

    @property
    def table_bytes(self) -> int:
        """Bytes of the model's table in float32."""
        return 4 * self.vocab * self.hidden


_MIB: Final = 2**20

FULL: Final = Sizes(
    vocab=50_257,
    hidden=768,
    heads=12,
    layers=4,
    sequence=128,
    microbatches=4,
    microbatch_size=4,
    steps=5,
    owner_rows=256_000,
    owner_columns=2_304,
    chunk_bytes=(4 * _MIB, 16 * _MIB, 64 * _MIB, 256 * _MIB),
    touched_rows=8_192,
    order_rows=8_192,
    delay_cycles=20_000_000,
    rounds=10,
)
"""GPT-2's table under four layers, and that of Gemma 2 2B."""

TINY: Final = Sizes(
    vocab=300,
    hidden=32,
    heads=2,
    layers=2,
    sequence=16,
    microbatches=4,
    microbatch_size=1,
    steps=5,
    owner_rows=2_000,
    owner_columns=64,
    chunk_bytes=(_MIB // 16,),
    touched_rows=256,
    order_rows=64,
    delay_cycles=0,
    rounds=3,
)
"""Shows that the checks themselves work."""
