"""A byte-level BPE vocabulary learnt from the text itself, and the text in its tokens.

Learning and encoding take seconds, so both results are kept in one file per (text, vocabulary
size, library version) in a cache folder. The file is written beside its place and moved there in
one step, so that two processes at once, or one killed half-way, leave a whole file or none; a
file that does not read back as expected is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from piper_owner.data.text import Text
from piper_owner.errors import ConfigError

__all__ = ["Encoded", "build_vocabulary", "encode"]

_NUM_BYTES: Final = 256
_FORMAT: Final = "1"
# Characters per piece handed to the library: pieces end at line ends, so no word is cut.
_PIECE: Final = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A vocabulary and a text in its tokens: int32, one-dimensional, read-only."""

    tokenizer: Tokenizer
    tokens: NDArray[np.int32]


def encode(text: Text, vocab_size: int, *, cache_dir: Path) -> NDArray[np.int32]:
    """The tokens of `text` in a vocabulary of at most `vocab_size` tokens learnt from it.

    One-dimensional int32, read-only, every id in `[0, vocab_size)`; see `build_vocabulary`.
    """
    return build_vocabulary(text, vocab_size, cache_dir=cache_dir).tokens


def build_vocabulary(text: Text, vocab_size: int, *, cache_dir: Path) -> Encoded:
    """Learn a byte-level BPE of at most `vocab_size` tokens from `text`, and encode it.

    Decoding the tokens gives the text back. The result is read from `cache_dir` when it is there,
    else made and put there, readable by this user alone; a folder that cannot be written is done
    without. Local; the same text and size give the same tokens in every process.

    Raises ConfigError for a size below 256: every byte is a token.
    """
    if vocab_size < _NUM_BYTES:
        raise ConfigError(
            f"--vocab {vocab_size}: a byte-level vocabulary has a token for each of the {_NUM_BYTES} bytes; "
            f"give at least {_NUM_BYTES}"
        )
    file = cache_dir / f"bpe-{_key(text, vocab_size)}.npz"
    found = _load(file, vocab_size)
    if found is not None:
        return found
    tokenizer = _learn(text.content, vocab_size)
    batch = tokenizer.encode_batch_fast(list(_pieces(text.content)))
    tokens = np.concatenate([np.asarray(piece.ids, dtype=np.int32) for piece in batch] or [_no_tokens()])
    made = Encoded(tokenizer=tokenizer, tokens=_read_only(tokens))
    # Without a cache the next run takes some seconds longer; that is no reason to fail this one.
    with contextlib.suppress(OSError):
        _store(file, made)
    return made


def _key(text: Text, vocab_size: int) -> str:
    parts = (_FORMAT, tokenizers.__version__, str(vocab_size), text.digest)
    return hashlib.blake2b("|".join(parts).encode(), digest_size=16).hexdigest()


def _learn(content: str, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(content), trainer=trainer)
    return tokenizer


def _pieces(content: str) -> Iterator[str]:
    """`content` cut after line ends into pieces of about `_PIECE` characters, or at that size."""
    start = 0
    while start < len(content):
        end = start + _PIECE
        if end < len(content):
            line_end = content.rfind("\n", start, end)
            end = end if line_end < 0 else line_end + 1
        yield content[start:end]
        start = end


def _load(file: Path, vocab_size: int) -> Encoded | None:
    """What `file` holds, or None when it is missing or damaged."""
    try:
        # Opened here: given a path, numpy leaves the file open when it is no archive.
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            tokens = stored["tokens"]
            tokenizer = Tokenizer.from_buffer(stored["tokenizer"].tobytes())
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error):
        return None
    # The archive has check sums; this guards against a whole file with something else in it.
    if tokens.dtype != np.int32 or tokens.ndim != 1 or tokenizer.get_vocab_size() > vocab_size:
        return None
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= tokenizer.get_vocab_size()):
        return None
    return Encoded(tokenizer=tokenizer, tokens=_read_only(tokens))


def _store(file: Path, made: Encoded) -> None:
    """Put `made` at `file` in one step; OSError when the folder cannot be used."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # mkstemp opens with mode 0600, so nobody else reads the text, not even for a moment.
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            vocabulary = np.frombuffer(made.tokenizer.to_str().encode(), dtype=np.uint8)
            np.savez(stream, tokens=made.tokens, tokenizer=vocabulary)
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _no_tokens() -> NDArray[np.int32]:
    return np.empty(0, dtype=np.int32)


def _read_only(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    tokens.flags.writeable = False
    return tokens
