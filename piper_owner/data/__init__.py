"""Text, its vocabulary, and the batches that training reads; no torch."""

from __future__ import annotations

from piper_owner.data.batches import IGNORED, Batch, TokenStream
from piper_owner.data.text import DEFAULT_LIMIT_BYTES, Text, read_text
from piper_owner.data.vocabulary import Encoded, build_vocabulary, encode

__all__ = [
    "DEFAULT_LIMIT_BYTES",
    "IGNORED",
    "Batch",
    "Encoded",
    "Text",
    "TokenStream",
    "build_vocabulary",
    "encode",
    "read_text",
]
