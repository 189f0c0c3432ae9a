"""Weights for and from elsewhere: safetensors, Hugging Face folders, and plain state dicts."""

from __future__ import annotations

import importlib
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from piper_owner.assignment import Ownership
from piper_owner.checkpoint.holding import MODEL, hold
from piper_owner.checkpoint.layout import check_files, read_index
from piper_owner.checkpoint.loading import refuse_unlike
from piper_owner.checkpoint.storage import read_tensors
from piper_owner.checkpoint.team import Team
from piper_owner.errors import CheckpointError, ConfigError
from piper_owner.sharding import is_sharded
from piper_owner.stages import NameMap, Stage

__all__ = ["export_safetensors", "load_weights"]

_SINGLE: Final = "model.safetensors"
_SHARDS: Final = "model.safetensors.index.json"


def export_safetensors(path: str | Path, file: str | Path) -> Path:
    """Write the weights of the checkpoint in `path` to `file`, in one process, as transformers loads them.
    Local.

    `file` is a safetensors file, or a folder that gets a model.safetensors. Each tie stands in it once,
    under its
    first name; the others are in its metadata, as JSON under "ties". Returns the file.

    Raises CheckpointError for a checkpoint that cannot be read or a file that cannot be written; ConfigError
    without the package safetensors.
    """
    source, target = Path(path), Path(file)
    library = _safetensors()
    target = target / _SINGLE if target.is_dir() else target
    index = read_index(source)
    check_files(source, index)
    tensors = {
        key: torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        for key, stored in index.tensors.items()
        if key.startswith(MODEL)
    }
    read_tensors(source, index, tensors)
    metadata = {"format": "pt", "ties": json.dumps([list(names) for names in index.ties])}
    new = target.with_name(f".{target.name}.new")
    try:
        library.save_file({key.removeprefix(MODEL): value for key, value in tensors.items()}, new, metadata)
        with new.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(new, target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error
    return target


def load_weights(
    source: str | Path | Mapping[str, Tensor],
    stages: Stage | Sequence[Stage],
    ownership: Ownership | None = None,
    *,
    strict: bool = True,
    names: NameMap | None = None,
) -> None:
    """Load the weights of a whole model into the stages. Collective over the ownership's ranks.

    source: a state_dict; a safetensors file; a Hugging Face folder with one or several; or a file of
    torch.save,
        which is read with weights_only=True. Of a tie any of its names will do; of several the values must
        be one.
    strict: refuse a weight that the stages have and the source does not.

    Masters of an OwnerOptimizer take the new values; moments stay. Nothing changes unless every rank can
    load.
    Raises CheckpointError on every rank.
    """
    team = Team(None if ownership is None else ownership.agreement)
    team.settle()
    found: list[tuple[Tensor, Tensor]] = []

    def read() -> str:
        holding = hold(stages, None, ownership, names)
        with _opened(source) as (available, take):
            for known, tensor in holding.loaded:
                present = [name for name in known if name in available]
                if not present and strict:
                    raise CheckpointError(
                        f"{_shown(source)} has no {' or '.join(map(repr, known))}, which the model has"
                    )
                values = [take(name) for name in present]
                refuse_unlike(known, values)
                if values:
                    _check_fits(source, present[0], values[0], tensor)
                    found.append((tensor, values[0]))
        return ""

    team.everyone(read)
    with torch.no_grad():
        for tensor, value in found:
            tensor.copy_(value)
    if ownership is not None:
        ownership.sync()


def _check_fits(source: object, name: str, value: Tensor, tensor: Tensor) -> None:
    if is_sharded(tensor):
        raise ConfigError(f"{name!r} is sharded: load the weights before fully_shard and assign_owners")
    if value.shape != tensor.shape:
        raise CheckpointError(
            f"{_shown(source)}: {name!r} has the shape {list(value.shape)}, and {list(tensor.shape)} in "
            f"the model"
        )


@contextmanager
def _opened(
    source: str | Path | Mapping[str, Tensor],
) -> Iterator[tuple[frozenset[str], Callable[[str], Tensor]]]:
    """The names in `source`, and what gives the value of one."""
    if isinstance(source, Mapping):
        yield frozenset(source), source.__getitem__
        return
    path = Path(source)
    if path.is_file() and path.suffix != ".safetensors":
        values = _plain_file(path)
        yield frozenset(values), values.__getitem__
        return
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for file in _files(path):
            try:
                opened = stack.enter_context(_safetensors_open(file))
                files |= dict.fromkeys(opened.keys(), opened)
            except (OSError, ValueError, _safetensors_error()) as error:
                raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
        yield frozenset(files), lambda name: files[name].get_tensor(name)


def _plain_file(path: Path) -> dict[str, Tensor]:
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"{path} cannot be read as weights alone: {first[:200]}") from error
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise CheckpointError(f"{path} holds no state_dict of a model: a dict of tensors by name is needed")
    return values


def _files(path: Path) -> list[Path]:
    """The safetensors files of a model: one, or those that a folder's index names."""
    if path.is_file():
        return [path]
    if (path / _SHARDS).is_file():
        try:
            listed = json.loads((path / _SHARDS).read_text(encoding="utf-8"))["weight_map"].values()
            found = sorted({Path(str(name)).name for name in listed})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path / _SHARDS} does not say which file holds which weight: {error}"
            ) from error
        return [path / name for name in found]
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    raise CheckpointError(
        f"{path} has neither {_SINGLE} nor {_SHARDS}; give a file, or a Hugging Face folder"
    )


def _shown(source: object) -> str:
    return "the state_dict" if isinstance(source, Mapping) else str(source)


def _safetensors() -> Any:  # noqa: ANN401 - optional, and without types
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ConfigError("safetensors is not installed; pip install 'piper-owner[hf]'") from error


def _safetensors_open(file: Path) -> Any:  # noqa: ANN401 - as above
    _safetensors()
    return importlib.import_module("safetensors").safe_open(file, framework="pt")


def _safetensors_error() -> type[Exception]:
    _safetensors()
    error: type[Exception] = importlib.import_module("safetensors").SafetensorError
    return error
