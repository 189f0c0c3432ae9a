"""A checkpoint on disk: a folder with data folders, and one small index that says which of them counts.

    DIR/checkpoint.json             the index: plain JSON, put in place by one rename
    DIR/data-00000040-1f0c.../      the tensors, files of torch.distributed.checkpoint

A save writes a new data folder, and the index only when all of it is on disk. So a save that is
killed leaves the last index, and with it the last checkpoint, as they were; the data folder that
it had begun is named by no index, and the next save removes it. Nothing here is a pickle: an index that
comes from elsewhere can be wrong, but it cannot run anything.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from piper_owner.errors import CheckpointError

__all__ = [
    "INDEX",
    "Chunk",
    "Group",
    "Index",
    "StoredTensor",
    "check_files",
    "has_checkpoint",
    "new_data_folder",
    "publish",
    "read_index",
    "remove_leftovers",
]

INDEX: Final = "checkpoint.json"
_KIND: Final = "piper-owner checkpoint"
_VERSION: Final = 1
_DATA: Final = re.compile(r"data-\d{8,20}-[0-9a-f]{16}")
_FILE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NEW: Final = f".{INDEX}.new"
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_MOST_DIMENSIONS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor, at `offsets` and of `sizes`: `length` bytes of `file` from `start` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """The shape and dtype of a saved tensor, and where its parts lie."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A parameter group of an optimizer: the names of what it steps on one rank, and its options.

    `place` is (optimizer, group), both by number on that rank.
    """

    place: tuple[int, int]
    parameters: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What a checkpoint holds. `values` are optimizer state that is no tensor, by key."""

    step: int
    data: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    ties: tuple[tuple[str, ...], ...] = ()
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()

    def to_json(self) -> str:
        """The text that `read_index` reads. Raises CheckpointError for what JSON cannot keep."""
        document = {
            "kind": _KIND,
            "version": _VERSION,
            "step": self.step,
            "data": self.data,
            "extra": dict(self.extra),
            "ties": [list(names) for names in self.ties],
            "tensors": {key: _stored_json(tensor) for key, tensor in self.tensors.items()},
            "values": dict(self.values),
            "groups": [
                {"place": list(g.place), "parameters": list(g.parameters), "options": dict(g.options)}
                for g in self.groups
            ],
        }
        try:
            return json.dumps(document, indent=1)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"a checkpoint keeps plain JSON values beside tensors: {error}") from error


def _stored_json(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "chunks": [[list(c.offsets), list(c.sizes), c.file, c.start, c.length] for c in tensor.chunks],
    }


# -- reading


def has_checkpoint(path: Path) -> bool:
    """Whether `path` is a folder with a checkpoint in it, whole or not. Local."""
    return (path / INDEX).exists()


def read_index(path: Path) -> Index:
    """The index of the checkpoint in `path`, checked through. Local.

    Raises CheckpointError, with what is wrong where, for a folder without one and for a file that is
    none, is of a later version, or contradicts itself.
    """
    file = path / INDEX
    try:
        if file.exists() and not file.is_file():  # reading a device or a pipe may never end
            raise CheckpointError(f"{file} is no checkpoint's index: it is not a file")
        text = file.read_bytes().decode()
    except FileNotFoundError:
        what = "does not exist" if not path.exists() else f"has no {INDEX} in it"
        raise CheckpointError(
            f"{path} {what}: there is no checkpoint; give the folder that was saved to"
        ) from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is no checkpoint's index: it is not text") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{file} cannot be read: {reason}") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no checkpoint's index: it is not JSON ({error})") from error
    try:
        return _parse(document)
    except _Wrong as error:
        raise CheckpointError(
            f"{file}: {error}; the file is damaged, or was not written by piper-owner"
        ) from None


class _Wrong(Exception):
    """What is wrong with an index, and where in it."""


def _parse(document: object) -> Index:
    top = _mapping(document, "the file")
    if top.get("kind") != _KIND:
        raise _Wrong(f"it is not a {_KIND}")
    version = _count(top.get("version"), "version")
    if version != _VERSION:
        raise _Wrong(f"its version is {version}, and this piper-owner reads version {_VERSION}")
    data = _text(top.get("data"), "data")
    if not _DATA.fullmatch(data):
        raise _Wrong(f"data: {data[:80]!r} is not the name of a data folder")
    tensors = {
        key: _tensor(value, f"tensor {key[:120]!r}")
        for key, value in _mapping(top.get("tensors"), "tensors").items()
    }
    ties = tuple(
        tuple(_text(name, "ties") for name in _list(names, "ties"))
        for names in _list(top.get("ties"), "ties")
    )
    named = [name for names in ties for name in names]
    if len(set(named)) != len(named) or not all(ties):
        raise _Wrong("ties: a name stands in two of them or twice in one, or one is empty")
    return Index(
        step=_count(top.get("step"), "step"),
        data=data,
        extra=_mapping(top.get("extra"), "extra"),
        ties=ties,
        tensors=tensors,
        values=_mapping(top.get("values"), "values"),
        groups=tuple(_group(each) for each in _list(top.get("groups"), "groups")),
    )


def _group(value: object) -> Group:
    given = _mapping(value, "groups")
    place = _sizes(given.get("place"), "place of a group")
    if len(place) != 2:
        raise _Wrong(f"place of a group: two numbers are needed, not {list(place)}")
    names = tuple(
        _text(name, "parameters of a group") for name in _list(given.get("parameters"), "parameters")
    )
    options = _mapping(given.get("options"), "options of a group")
    return Group(place=(place[0], place[1]), parameters=names, options=options)


def _tensor(value: object, where: str) -> StoredTensor:
    given = _mapping(value, where)
    shape = _sizes(given.get("shape"), f"{where}, shape")
    dtype = _DTYPES.get(_text(given.get("dtype"), f"{where}, dtype"))
    if dtype is None:
        raise _Wrong(f"{where}: {str(given.get('dtype'))[:80]!r} is not a dtype of torch")
    chunks = tuple(
        _chunk(each, shape, dtype, where) for each in _list(given.get("chunks"), f"{where}, chunks")
    )
    # They do not overlap, as every saved one comes from one rank; so they cover it if they are as large.
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise _Wrong(f"{where}: its parts do not make up its shape {list(shape)}")
    if len({chunk.offsets for chunk in chunks if math.prod(chunk.sizes)}) != sum(
        math.prod(chunk.sizes) > 0 for chunk in chunks
    ):
        raise _Wrong(f"{where}: two of its parts are at one place")
    return StoredTensor(shape=shape, dtype=dtype, chunks=chunks)


def _chunk(value: object, shape: tuple[int, ...], dtype: torch.dtype, where: str) -> Chunk:
    given = _list(value, f"{where}, a part")
    if len(given) != 5:
        raise _Wrong(f"{where}: a part has 5 entries, not {len(given)}")
    offsets, sizes = _sizes(given[0], f"{where}, offsets"), _sizes(given[1], f"{where}, sizes")
    if len(offsets) != len(shape) or len(sizes) != len(shape):
        raise _Wrong(f"{where}: a part has other dimensions than the shape {list(shape)}")
    if any(o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=True)):
        raise _Wrong(f"{where}: a part reaches beyond the shape {list(shape)}")
    file = _text(given[2], f"{where}, file")
    if not _FILE.fullmatch(file):
        raise _Wrong(f"{where}: {file[:80]!r} is not the name of a data file")
    start, length = _count(given[3], f"{where}, start"), _count(given[4], f"{where}, length")
    if length < math.prod(sizes) * dtype.itemsize:
        raise _Wrong(f"{where}: {length} bytes hold no {list(sizes)} of {dtype}")
    return Chunk(offsets=offsets, sizes=sizes, file=file, start=start, length=length)


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"{where}: an object is needed, not {_shown(value)}")
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Wrong(f"{where}: a list is needed, not {_shown(value)}")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise _Wrong(f"{where}: a text is needed, not {_shown(value)}")
    return value


def _count(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise _Wrong(f"{where}: a whole number from 0 on is needed, not {_shown(value)}")
    return value


def _sizes(value: object, where: str) -> tuple[int, ...]:
    sizes = tuple(_count(each, where) for each in _list(value, where))
    if len(sizes) > _MOST_DIMENSIONS:
        raise _Wrong(f"{where}: {len(sizes)} dimensions are more than a tensor has")
    return sizes


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)[:60]


def check_files(path: Path, index: Index) -> None:
    """Raise CheckpointError unless every data file that `index` names is there and long enough. Local."""
    needed: dict[str, int] = {}
    for tensor in index.tensors.values():
        for chunk in tensor.chunks:
            needed[chunk.file] = max(needed.get(chunk.file, 0), chunk.start + chunk.length)
    for name, size in needed.items():
        file = path / index.data / name
        try:
            found = file.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{file} is missing ({error.strerror or error}): the folder of a checkpoint must be on "
                f"a file "
                "system that every rank sees, and be copied whole"
            ) from error
        if found < size:
            raise CheckpointError(
                f"{file} has {found} bytes where the checkpoint has put {size}: it is cut off; copy it "
                f"again, or "
                "load an older checkpoint"
            )


# -- writing


def new_data_folder(step: int) -> str:
    """A name for a data folder that no other save has."""
    return f"data-{step:08d}-{secrets.token_hex(8)}"


def publish(path: Path, index: Index) -> None:
    """Make `index` the checkpoint of `path`, in one step and for good: its data is on disk. Local.

    Raises CheckpointError where it cannot be written; the last checkpoint is as it was then.
    """
    text = index.to_json()
    beside = path / _NEW
    try:
        _sync_folder(path / index.data)
        _sync_folder(path)
        with beside.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, path / INDEX)
        _sync_folder(path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: the checkpoint cannot be written: {error.strerror or error}"
        ) from error


def remove_leftovers(path: Path, index: Index) -> None:
    """Remove the data that `index`, the one in place, does not name: older, or of killed saves. Local."""
    for entry in sorted(path.iterdir()):
        if _DATA.fullmatch(entry.name) and entry.name != index.data:
            shutil.rmtree(entry, ignore_errors=True)  # what stays is ignored, and tried again next time
    with contextlib.suppress(OSError):
        (path / _NEW).unlink(missing_ok=True)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
