"""Save: every rank writes what it alone has, and the checkpoint is in place when all of it is on disk."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piper_owner.assignment import Ownership
from piper_owner.checkpoint.holding import Holding, hold
from piper_owner.checkpoint.layout import (
    Group,
    Index,
    check_files,
    new_data_folder,
    publish,
    remove_leftovers,
)
from piper_owner.checkpoint.storage import PartWriter
from piper_owner.checkpoint.team import SaveHandle, Team
from piper_owner.errors import CheckpointError, ReplicaMismatchError
from piper_owner.rows import RowsParameter
from piper_owner.sharding import is_sharded
from piper_owner.stages import NameMap, Stage

__all__ = ["Saver", "async_save", "save"]


def save(
    path: str | Path,
    stages: Stage | Sequence[Stage],
    optimizer: torch.optim.Optimizer | None = None,
    ownership: Ownership | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    names: NameMap | None = None,
) -> None:
    """Save weights and optimizer state into the folder `path`. Collective over the ownership's ranks.

    path: a folder that all ranks see; it is made if needed. A checkpoint in it stays as it is until the new
    one
        is whole on disk, and is replaced then in one step; so a killed save loses nothing.
    stages, optimizer, ownership: those of this rank; without an ownership, a whole model in one process.
    step: a number to keep with it; by default the ownership's count of steps, or 0.
    extra: what else to keep, plain JSON; that of the first rank counts.
    names: from names in the stages to names in the full model; by default those that `assign_owners` was
    given.

    A tie is saved once, by its owner, under its first name. Raises on every rank: ReplicaMismatchError, with
    the
    largest difference, if a copy of a tie is not the owner's value; CheckpointError if it cannot be written;
    ExchangeError when a rank fails or does not come.
    """
    saver, team = _prepare(path, stages, optimizer, ownership, step, extra, names)
    saver.write(team)


def async_save(
    path: str | Path,
    stages: Stage | Sequence[Stage],
    optimizer: torch.optim.Optimizer | None = None,
    ownership: Ownership | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    names: NameMap | None = None,
) -> SaveHandle:
    """As `save`, but returns when this rank's state has been copied to the host's memory. Collective.

    The files are written in a thread while training goes on; `wait` of the handle raises what goes wrong.
    The next
    save or load of the same ranks waits for it.
    """
    saver, team = _prepare(path, stages, optimizer, ownership, step, extra, names)
    saver.stage()
    return team.in_background(saver.write)


def _prepare(
    path: str | Path,
    stages: Stage | Sequence[Stage],
    optimizer: torch.optim.Optimizer | None,
    ownership: Ownership | None,
    step: int | None,
    extra: Mapping[str, Any] | None,
    names: NameMap | None,
) -> tuple[Saver, Team]:
    team = Team(None if ownership is None else ownership.agreement)
    team.settle()
    if ownership is not None:
        ownership.refuse_closed()
        ownership.exchange.flush()
    count = 0 if ownership is None else ownership.step
    saver = Saver(Path(path), count if step is None else step, extra or {})
    saver.plan(
        team,
        lambda: hold(stages, optimizer, ownership, names),
        check=(lambda: True) if ownership is None else ownership.check,
    )
    return saver, team


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all ranks have said of a save."""

    data: str
    ties: tuple[tuple[str, ...], ...]
    values: dict[str, Any]
    groups: tuple[Group, ...]


class Saver:
    """One save on one rank: `plan`, then `write`, and `stage` in between if training is to go on."""

    def __init__(self, path: Path, step: int, extra: Mapping[str, Any]) -> None:
        self._path, self._step, self._extra = path, step, extra
        self._writer: PartWriter | None = None
        self._shared: _Shared | None = None

    def plan(self, team: Team, look: Callable[[], Holding], *, check: Callable[[], object]) -> None:
        """Agree on who writes what. `check` raises ReplicaMismatchError for copies that differ.
        Collective."""
        held: list[Holding] = []

        def describe() -> str:
            holding = look()
            held.append(holding)
            tensors, values, groups = holding.saved_state()
            tensors |= holding.saved()
            self._writer = PartWriter(tensors, team.rank)
            index = Index(step=self._step, data=new_data_folder(self._step), extra=self._extra)
            index.to_json()  # refuses an extra that JSON cannot keep
            return json.dumps(
                {
                    "where": [str(self._path.absolute()), self._step],
                    "data": index.data,
                    "ties": holding.ties,
                    "values": values,
                    "groups": [[g.place, g.parameters, g.options] for g in groups],
                    "plan": self._writer.plan(),
                    "copies": _digests(holding),
                }
            )

        answers = [json.loads(text) for text in team.everyone(describe)]
        _check_alike(answers, "where", "path and step")
        self._check_copies(team, answers, check)
        self._check_doubles(team, answers, held[0])
        assert self._writer is not None
        self._writer.decide([answer["plan"] for answer in answers])
        ties = dict.fromkeys(tuple(names) for answer in answers for names in answer["ties"])
        self._shared = _Shared(
            data=answers[0]["data"],
            ties=tuple(ties),
            values={key: value for answer in answers for key, value in answer["values"].items()},
            groups=tuple(
                Group(place=(place[0], place[1]), parameters=tuple(names), options=options)
                for answer in answers
                for place, names, options in answer["groups"]
            ),
        )

    def _check_copies(
        self, team: Team, answers: Sequence[Mapping[str, Any]], check: Callable[[], object]
    ) -> None:
        """Compare the copies of ties: by digest, and where those differ by `check`, which says how much."""
        found: dict[str, set[str]] = defaultdict(set)
        for answer in answers:
            for name, digest in answer["copies"].items():
                found[name].add(digest)
        differing = sorted(name for name, digests in found.items() if len(digests) > 1)
        if not differing:
            return
        failed: list[ReplicaMismatchError] = []
        try:
            check()
        except ReplicaMismatchError as error:
            failed.append(error)

        def tell() -> str:
            if failed:
                raise failed[0]
            return ""

        team.everyone(tell)
        raise ReplicaMismatchError(
            f"the copies of {differing} are not one value on all ranks; nothing was saved"
        )

    def _check_doubles(self, team: Team, answers: Sequence[Mapping[str, Any]], held: Holding) -> None:
        """Refuse a name that several ranks save, of no tie, unless its value is one on all of them."""
        counts: dict[str, int] = defaultdict(int)
        for answer in answers:
            for item in json.loads(answer["plan"]):
                counts[item["key"]] += not item["shard"]
        doubled = {key for key, count in counts.items() if count > 1}
        if not doubled:
            return
        mine = held.saved()
        texts = team.everyone(lambda: json.dumps({key: _digest(mine[key]) for key in doubled & set(mine)}))
        for key in sorted(doubled):
            digests = {
                rank: found[key] for rank, text in enumerate(texts) if key in (found := json.loads(text))
            }
            if len(set(digests.values())) != 1:
                name = key.partition(".")[2]
                raise CheckpointError(
                    f"{name!r} is on the ranks {sorted(digests)} with different values, and is in no "
                    f"tie: a model "
                    "has one value for a name. Give each its own name with names=, or tie them in "
                    "assign_owners"
                )

    def stage(self) -> None:
        """Copy what this rank writes into the host's memory, so that training may go on. Local."""
        assert self._writer is not None
        self._writer.stage()

    def write(self, team: Team) -> None:
        """Write, and put the checkpoint in place. Collective over the ranks of `team`, those of `plan`."""
        assert self._shared is not None
        assert self._writer is not None
        shared, writer = self._shared, self._writer
        folder = self._path / shared.data
        team.once(lambda: _make(folder))

        def write() -> str:
            try:
                return writer.write(folder)
            except OSError as error:
                raise CheckpointError(f"{folder}: cannot write: {error.strerror or error}") from error

        results = team.everyone(write)

        def finish() -> None:
            index = Index(
                step=self._step,
                data=shared.data,
                extra=self._extra,
                ties=shared.ties,
                tensors=writer.finish(results),
                values=shared.values,
                groups=shared.groups,
            )
            check_files(self._path, index)
            publish(self._path, index)
            remove_leftovers(self._path, index)

        team.once(finish)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"{folder.parent}: no checkpoint can be written there: {error.strerror or error}"
        ) from error


def _check_alike(answers: Sequence[Mapping[str, Any]], key: str, what: str) -> None:
    for rank, answer in enumerate(answers):
        if answer[key] != answers[0][key]:
            raise CheckpointError(
                f"rank {rank} was given another {what} than rank 0: {answer[key]} against {answers[0][key]}"
            )


def _digests(holding: Holding) -> dict[str, str]:
    """By the first name of each tie, what tells this rank's copy from another; none for rows or shards."""
    tied = {names[0] for names in holding.ties}
    return {
        names[0]: _digest(tensor)
        for names, tensor in holding.places
        if names[0] in tied and not isinstance(tensor, RowsParameter) and not is_sharded(tensor)
    }


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()
