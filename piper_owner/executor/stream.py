"""The batches of a run, from its tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from piper_owner.data.batches import TokenStream
from piper_owner.executor.config import TrainConfig

__all__ = ["token_stream"]


def token_stream(config: TrainConfig, tokens: NDArray[np.int32]) -> TokenStream:
    """Batches for all pipelines of `config`; `tokens` is one-dimensional.

    Raises DataError when they do not fill one sequence.
    """
    return TokenStream(
        tokens,
        microbatches=config.all_microbatches,
        microbatch_size=config.microbatch_size,
        sequence_length=config.sequence_length,
    )
