"""The parts of torch.distributed.checkpoint that read and write tensors, with plans and an index as JSON.

torch's own `.metadata` is a pickle, and so are the plans that its ranks send one another. A save
still writes a `.metadata`, so that other tools can read the data folder; nothing here reads one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from piper_owner.checkpoint.layout import Chunk, Index, StoredTensor
from piper_owner.errors import CheckpointError

__all__ = ["PartWriter", "read_tensors"]


class _Planner(DefaultSavePlanner):
    """Gives what was staged instead of tensors that have changed since."""

    def __init__(self, *, flatten_state_dict: bool) -> None:
        super().__init__(flatten_state_dict=flatten_state_dict)
        self.staged: dict[MetadataIndex, torch.Tensor] = {}

    def lookup_object(self, index: MetadataIndex) -> Any:  # noqa: ANN401 - as torch declares it
        return self.staged[index] if index in self.staged else super().lookup_object(index)


class PartWriter:
    """Writes this rank's tensors into the data folder, in three steps between which the ranks tell one
    another
    what each of them did, as text: `plan`, `write` and, on one rank, `finish`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], rank: int) -> None:
        self._tensors, self._rank = dict(tensors), rank
        self._planner = _Planner(flatten_state_dict=False)
        self._metadata: Metadata | None = None
        self._plan: SavePlan | None = None
        self._writer: FileSystemWriter | None = None

    def plan(self) -> str:
        """What this rank has, for `decide` of every rank."""
        self._planner.set_up_planner(self._tensors, None, self._rank == 0)
        return json.dumps([_item_json(item) for item in self._planner.create_local_plan().items])

    def decide(self, plans: Sequence[str]) -> None:
        """Take the plans of all ranks, the same on each, in order. Local.

        Raises CheckpointError if a sharded tensor is not whole in all of them together.
        """
        local = [SavePlan([_item(each) for each in json.loads(text)]) for text in plans]
        try:
            decided, self._metadata = self._planner.create_global_plan(local)
        except ValueError as error:
            raise CheckpointError(
                f"the shards of all ranks do not make up whole tensors ({error}): give assign_owners the "
                "dp_group over which fully_shard has sharded, so that all of its ranks save together"
            ) from error
        self._plan = decided[self._rank]

    def stage(self) -> None:
        """Copy what this rank writes, so that the tensors may change before `write`. Local."""
        assert self._plan is not None
        for item in self._plan.items:
            data = self._planner.resolve_data(item)
            assert isinstance(data, torch.Tensor)
            self._planner.staged[item.index] = data.detach().to("cpu", copy=True)

    def write(self, folder: Path) -> str:
        """Write the files of this rank into `folder`, to disk; the text for `finish`."""
        assert self._plan is not None
        self._writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, overwrite=True)
        self._writer.set_up_storage_writer(self._rank == 0, rank=self._rank)
        self._writer.prepare_local_plan(self._plan)
        plan = self._planner.finish_plan(self._plan)
        plan = SavePlan(plan.items, storage_data=_StoragePrefix(f"__{self._rank}_"))
        results = self._writer.write_data(plan, self._planner).wait() if plan.items else []
        return json.dumps([_result_json(result) for result in results])

    def finish(self, results: Sequence[str]) -> dict[str, StoredTensor]:
        """Write torch's `.metadata`, for other tools; what all ranks have stored, by key. On one rank."""
        assert self._metadata is not None
        assert self._writer is not None
        made = [[_result(each) for each in json.loads(text)] for text in results]
        self._writer.finish(self._metadata, made)
        places = {
            (result.index.fqn, result.index.offset): result.storage_data for each in made for result in each
        }
        return {
            key: _stored(key, tensor, places) for key, tensor in self._metadata.state_dict_metadata.items()
        }


def _stored(key: str, tensor: object, places: Mapping[Any, Any]) -> StoredTensor:
    assert isinstance(tensor, TensorStorageMetadata)
    chunks = []
    for chunk in tensor.chunks:
        info = places[key, chunk.offsets]
        chunks.append(
            Chunk(
                offsets=tuple(chunk.offsets),
                sizes=tuple(chunk.sizes),
                file=info.relative_path,
                start=info.offset,
                length=info.length,
            )
        )
    return StoredTensor(shape=tuple(tensor.size), dtype=tensor.properties.dtype, chunks=tuple(chunks))


class _Reader(FileSystemReader):
    """Reads the data folder of an index, which takes the place of torch's `.metadata`."""

    def __init__(self, path: Path, index: Index) -> None:
        super().__init__(path / index.data)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ANN401 - as torch declares it
        """The index, in the form that torch plans with."""
        tensors, places = {}, {}
        for key, stored in self.index.tensors.items():
            chunks = [
                ChunkStorageMetadata(offsets=torch.Size(c.offsets), sizes=torch.Size(c.sizes))
                for c in stored.chunks
            ]
            tensors[key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=stored.dtype), size=torch.Size(stored.shape), chunks=chunks
            )
            for chunk in stored.chunks:
                place = MetadataIndex(key, chunk.offsets)
                places[place] = _StorageInfo(chunk.file, chunk.start, chunk.length)
        return Metadata(state_dict_metadata=dict(tensors), storage_data=places)


def read_tensors(path: Path, index: Index, targets: Mapping[str, torch.Tensor]) -> None:
    """Fill `targets`, by key of `index`, each of the shape that was saved; DTensors get their part. Local.

    Raises CheckpointError for a data file that is damaged. Loads tensors alone, whatever the files hold.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    reader = _Reader(path, index)
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(targets), metadata, False)
    reader.set_up_storage_reader(metadata, False)
    try:
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except CheckpointError:
        raise
    except Exception as error:  # torch has no one class for what a damaged archive makes it raise
        first = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            f"{path / index.data}: its tensors cannot be read ({type(error).__name__}: {first[:200]}); "
            f"a file of it "
            "is damaged: copy it again, or load an older checkpoint"
        ) from error


# -- plans and results as text


def _item_json(item: WriteItem) -> dict[str, Any]:
    data = item.tensor_data
    assert data is not None, "only tensors are saved"
    return {
        "key": item.index.fqn,
        "offset": None if item.index.offset is None else list(item.index.offset),
        "shard": item.type is WriteItemType.SHARD,
        "offsets": list(data.chunk.offsets),
        "sizes": list(data.chunk.sizes),
        "size": list(data.size),
        "dtype": str(data.properties.dtype).removeprefix("torch."),
    }


def _item(given: Mapping[str, Any]) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(given["key"], given["offset"]),
        type=WriteItemType.SHARD if given["shard"] else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(
                offsets=torch.Size(given["offsets"]), sizes=torch.Size(given["sizes"])
            ),
            properties=TensorProperties(dtype=getattr(torch, given["dtype"])),
            size=torch.Size(given["size"]),
        ),
    )


def _result_json(result: WriteResult) -> list[Any]:
    info, index = result.storage_data, result.index
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, result.size_in_bytes, info.relative_path, info.offset, info.length]


def _result(given: Sequence[Any]) -> WriteResult:
    key, offset, size, file, start, length = given
    return WriteResult(
        index=MetadataIndex(key, offset),
        size_in_bytes=size,
        storage_data=_StorageInfo(file, start, length),
    )
