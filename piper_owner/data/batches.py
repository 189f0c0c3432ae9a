"""Batches of a token stream: every sequence of a batch reads on in a part of the text of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from piper_owner.errors import ConfigError, DataError

__all__ = ["IGNORED", "Batch", "TokenStream"]

IGNORED: Final = -100
"""A label that does not count towards the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's data: int64 `(microbatches, microbatch_size, sequence_length)`, twice."""

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """Labels that count towards the loss: all but those that are IGNORED."""
        return int(np.count_nonzero(self.labels != IGNORED))


class TokenStream:
    """Cuts `tokens` (integers, one-dimensional) into one batch per step.

    Raises ConfigError for a size below 1, and DataError for fewer tokens than one sequence and
    the label of its last token.
    """

    def __init__(
        self, tokens: NDArray[np.integer], *, microbatches: int, microbatch_size: int, sequence_length: int
    ) -> None:
        self._shape = (microbatches, microbatch_size, sequence_length)
        if min(self._shape) < 1:
            raise ConfigError(
                f"--microbatches {microbatches}, --microbatch-size {microbatch_size} and --sequence-length "
                f"{sequence_length}: each must be at least 1"
            )
        if tokens.size < sequence_length + 1:
            raise DataError(
                f"the text has only {tokens.size} tokens, and one sequence of {sequence_length} tokens needs "
                f"{sequence_length + 1}: give a longer text, or a smaller --sequence-length"
            )
        self._tokens = tokens

    def batch(self, step: int) -> Batch:
        """The batch of `step` (from 0); the same step always gives the same batch.

        Sequence i of n starts at i / n of the text and reads on there step after step, from the
        start again at the end of the text: a batch is a sample of all of it, not of one file. A
        label is the next token of the stream.
        """
        if step < 0:
            raise ConfigError(f"step {step}: steps count from 0")
        microbatches, size, length = self._shape
        num_sequences = microbatches * size
        starts = np.arange(num_sequences) * self._tokens.size // num_sequences
        offset = step * length % self._tokens.size
        places = starts[:, None] + np.arange(offset, offset + length + 1)
        window = self._tokens.take(places, mode="wrap").astype(np.int64)
        ids, labels = window[:, :-1], window[:, 1:]
        return Batch(ids=ids.reshape(self._shape), labels=labels.reshape(self._shape))
