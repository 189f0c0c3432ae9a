"""The header that covers every message, and the checks on it.

gloo and NCCL accept a message of another size or dtype without a word: the receiver gets
garbage, keeps stale elements, or dies. So each message is preceded by a header of `HEADER_BYTES`
that says what follows, and nothing more is received before it was found to be what is expected.
The payload follows in chunks of whole rows, so that a large parameter streams.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from piper_owner.cost import ALIGNMENT, HEADER_BYTES, rows_per_chunk
from piper_owner.errors import InputError, MessageMismatchError, TieError

__all__ = ["ALIGNMENT", "HEADER_BYTES", "Header", "Phase", "row_ranges", "rows_per_chunk"]

_MAGIC: Final = b"PO01"
_MAX_DIMS: Final = 8
_MAX_LENGTH: Final = 2**16 - 1
_FIXED: Final = struct.Struct("<4sBBBBqqqq8q16sH")
_CHECKSUM: Final = struct.Struct("<I")
_NAME_BYTES: Final = HEADER_BYTES - _FIXED.size - _CHECKSUM.size
_DTYPES: Final = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


class Phase(enum.Enum):
    """What a message is for; the words stand in error messages."""

    ACTIVATION = "activation"
    INPUT_GRAD = "input gradient"
    GRAD = "gradient"
    WEIGHT = "weights"
    VALUE = "initial value"
    CHECK = "replica check"
    FREEZE = "change of requires_grad"
    IDS = "row ids"
    MORE_IDS = "more row ids"
    NEXT_IDS = "row ids of the next step"
    ROWS = "rows"
    SNAPSHOT = "snapshot"


_PHASES: Final = tuple(Phase)
_BETWEEN_STAGES: Final = (Phase.ACTIVATION, Phase.INPUT_GRAD)


def row_ranges(num_rows: int, chunk_rows: int) -> Iterator[tuple[int, int]]:
    """The (start, stop) rows of each chunk, in order; none for an empty tensor."""
    for start in range(0, num_rows, chunk_rows):
        yield start, min(num_rows, start + chunk_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a message holds.

    `subject` is the tie's name or the stage that the tensor belongs to. A message that is not
    `present` has no payload: the gradient is None, or the weights did not change. `chunk_rows` is
    the sender's choice, and so is whether the payload goes from device to device (`is_direct`). A change
    of requires_grad never has a payload; there `present` is the new value.

    Raises TieError (InputError for what goes between stages) when `shape` has more than 8 dimensions
    or no header can name `dtype`: complex, quantised and unsigned types of more than 8 bits.
    """

    phase: Phase
    subject: str
    step: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    microbatch: int = 0
    chunk_rows: int = 1
    present: bool = True
    is_direct: bool = False

    def __post_init__(self) -> None:
        wrong = None
        if self.dtype not in _DTYPES:
            known = ", ".join(map(_show, _DTYPES))
            wrong = f"its dtype is {_show(self.dtype)}; a message is one of {known}. Convert it"
        elif len(self.shape) > _MAX_DIMS:
            wrong = (
                f"its shape {self.shape} has {len(self.shape)} dimensions, a message at most {_MAX_DIMS}. "
                "Flatten some of them"
            )
        if wrong is not None:
            error = InputError if self.phase in _BETWEEN_STAGES else TieError
            raise error(f"the {self.phase.value} of {self.subject!r} cannot be sent: {wrong}")

    @property
    def num_rows(self) -> int:
        """Rows of the first dimension; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    def ranges(self) -> Iterator[tuple[int, int]]:
        """The rows of each chunk that follows this header."""
        if self.present and 0 not in self.shape:
            yield from row_ranges(self.num_rows, self.chunk_rows)

    def encode(self) -> torch.Tensor:
        """The header as a uint8 tensor of `HEADER_BYTES`, with a checksum."""
        name = self.subject.encode(errors="backslashreplace")
        dims = (*self.shape, *([0] * (_MAX_DIMS - len(self.shape))))
        fixed = _FIXED.pack(
            _MAGIC,
            _PHASES.index(self.phase),
            self.present | self.is_direct << 1,
            _DTYPES.index(self.dtype),
            len(self.shape),
            self.step,
            self.microbatch,
            self.chunk_rows,
            self.num_rows,
            *dims,
            _digest(name),
            min(len(name), _MAX_LENGTH),
        )
        body = fixed + name[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        return torch.frombuffer(bytearray(body + _CHECKSUM.pack(zlib.crc32(body))), dtype=torch.uint8)

    @classmethod
    def decode(cls, raw: torch.Tensor, where: str) -> Header:
        """The header in `raw`. Raises MessageMismatchError, saying `where`, if it is damaged."""
        data = raw.numpy().tobytes()
        body, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
        is_whole = len(data) == HEADER_BYTES and data.startswith(_MAGIC)
        if not is_whole or _CHECKSUM.pack(zlib.crc32(body)) != checksum:
            raise MessageMismatchError(
                f"{where}: the bytes that arrived are no message header; the two ranks have lost step with "
                "each other or run different versions of piper-owner"
            )
        _, phase, present, dtype, num_dims, step, microbatch, chunk_rows, _, *rest = _FIXED.unpack_from(body)
        dims, (digest, length) = rest[:_MAX_DIMS], rest[_MAX_DIMS:]
        name = body[_FIXED.size :][: min(length, _NAME_BYTES)].decode(errors="replace")
        if length > _NAME_BYTES:
            name = f"{name}...{digest.hex()}"
        return cls(
            phase=_PHASES[phase],
            subject=name,
            step=step,
            dtype=_DTYPES[dtype],
            shape=tuple(dims[:num_dims]),
            microbatch=microbatch,
            chunk_rows=chunk_rows,
            present=bool(present & 1),
            is_direct=bool(present & 2),
        )

    def check(self, expected: Header, where: str, *, any_tensor: bool = False) -> None:
        """Raise MessageMismatchError, saying `where` and what differs, unless this is `expected`.

        `any_tensor` leaves shape and dtype open: activations tell theirs.
        """
        names = ["phase", "subject", "step", "microbatch"]
        if not any_tensor:
            names += ["dtype", "shape"]
        wanted = expected.as_received()
        wrong = [
            f"{name} is {_show(getattr(self, name))}, expected {_show(getattr(wanted, name))}"
            for name in names
            if getattr(self, name) != getattr(wanted, name)
        ]
        if wrong:
            raise MessageMismatchError(
                f"{where}: the message that arrived is not the one expected: {'; '.join(wrong)}. Every "
                "holder of a tie must have the same shape and dtype and call step equally often"
            )

    def as_received(self) -> Header:
        """This header with its subject cut as `decode` cuts it."""
        return Header.decode(self.encode(), "")


def _digest(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=16).digest()


def _show(value: object) -> str:
    return value.value if isinstance(value, Phase) else repr(value).removeprefix("torch.")
