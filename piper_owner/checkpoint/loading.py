"""Load: every rank reads what it holds, whatever ranks, stages, owners and layout have saved it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from piper_owner.assignment import Ownership
from piper_owner.checkpoint.holding import MODEL, OPTIMIZER, Holding, hold, like_option
from piper_owner.checkpoint.layout import Index, check_files, read_index
from piper_owner.checkpoint.storage import read_tensors
from piper_owner.checkpoint.team import Team
from piper_owner.errors import CheckpointError
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.replicas import largest_difference, same_bits
from piper_owner.sharding import is_sharded, like, local_of
from piper_owner.stages import NameMap, Stage
from piper_owner.stepping import MASTER

__all__ = ["Loaded", "Loader", "load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The step at which a checkpoint was saved, and what else was kept with it."""

    step: int
    extra: Mapping[str, Any] = field(default_factory=dict)


def load(
    path: str | Path,
    stages: Stage | Sequence[Stage],
    optimizer: torch.optim.Optimizer | None = None,
    ownership: Ownership | None = None,
    *,
    strict: bool = True,
    names: NameMap | None = None,
) -> Loaded:
    """Load what `save` has saved in `path`. Collective over the ownership's ranks.

    It may have been saved under other numbers of stages, ranks and pipelines, with another owner and in
    another
    layout, or by one process. Arguments as for `save`; without an optimizer the weights alone are loaded.
    With
    one, options of its groups, masters and moments come back bit for bit, and every replica is the owner's
    value.
    strict: refuse weights of the checkpoint that no rank has.

    Nothing is changed unless every rank has read all it needs. Raises CheckpointError, on every rank, for a
    checkpoint that is missing, damaged, or does not fit; no file is ever unpickled.
    """
    team = Team(None if ownership is None else ownership.agreement)
    team.settle()
    loader = Loader(Path(path))
    loader.read(team, lambda: hold(stages, optimizer, ownership, names), strict=strict)
    loader.fill()
    if optimizer is not None:
        optimizer.load_state_dict(loader.state_dicts()[0])
    if ownership is not None:
        if not isinstance(optimizer, OwnerOptimizer):
            ownership.sync()
        ownership.step = loader.index.step
    return Loaded(step=loader.index.step, extra=loader.index.extra)


class Loader:
    """One load on one rank: `read`, then `fill` the weights, and `state_dicts` for the optimizers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._index: Index | None = None
        self._holding: Holding | None = None
        self._values: dict[str, Tensor] = {}
        self._keys: list[tuple[str, Tensor]] = []

    @property
    def index(self) -> Index:
        """What the checkpoint holds; after `read`."""
        assert self._index is not None
        return self._index

    def read(self, team: Team, look: Any, *, strict: bool) -> None:  # noqa: ANN401 - () -> Holding
        """Read all that this rank needs into the host's memory. Collective; changes nothing."""

        def plan() -> str:
            self._index = read_index(self._path)
            check_files(self._path, self._index)
            self._holding = look()
            taken = self._plan_weights(self._holding)
            self._plan_state(self._holding)
            self._check_options()
            return json.dumps([self._index.data, self._index.step, taken])

        answers = [json.loads(text) for text in team.everyone(plan)]
        for rank, answer in enumerate(answers):
            if answer[0] != answers[0][0]:
                raise CheckpointError(
                    f"{self._path}: rank {rank} sees the checkpoint {answer[0]} and rank 0 "
                    f"{answers[0][0]}; it was "
                    "replaced meanwhile, or is not on a file system that all ranks share. Load it again"
                )
        known = {key.removeprefix(MODEL) for key in self.index.tensors if key.startswith(MODEL)}
        unused = sorted(known - {name for answer in answers for name in answer[2]})
        if strict and unused:
            raise CheckpointError(
                f"{self._path} has weights that no rank holds: "
                f"{unused[:8]}{' and more' * (len(unused) > 8)}; load "
                "it into the model it was saved from, or with strict=False"
            )

        def fetch() -> str:
            read_tensors(self._path, self.index, self._values)
            self._check_aliases()
            return ""

        team.everyone(fetch)

    # -- what is needed

    def _plan_weights(self, holding: Holding) -> list[str]:
        """Set out what to read for each tensor of this rank; the names in the checkpoint that it takes."""
        first = {name: names[0] for names in self.index.ties for name in names}
        taken: list[str] = []
        for names, tensor in holding.loaded:
            keys = list(dict.fromkeys(MODEL + first.get(name, name) for name in names))
            keys = [key for key in keys if key in self.index.tensors]
            if not keys:
                raise CheckpointError(
                    f"{self._path} has no {' or '.join(map(repr, names))}, which the model has"
                )
            taken += [key.removeprefix(MODEL) for key in keys]
            chosen = self._widest(keys[0], holding, tensor)
            for key in [chosen, *keys[1:]]:
                self._want(key, tensor, names[0])
            self._keys.append((chosen, tensor))
        # A rank of rows takes no value of the tie, and yet its name is not unused.
        return taken + [first.get(name, name) for names, _ in holding.places for name in names]

    def _widest(self, key: str, holding: Holding, tensor: Tensor) -> str:
        """The key of the master where that was saved, has more bits than the weight, and `tensor` has
        none."""
        master = f"{OPTIMIZER}{key.removeprefix(MODEL)}.{MASTER}"
        stored = self.index.tensors.get(master)
        is_wider = tensor.dtype.itemsize > self.index.tensors[key].dtype.itemsize
        return master if stored is not None and is_wider else key

    def _want(self, key: str, tensor: Tensor, name: str) -> None:
        stored = self.index.tensors[key]
        if stored.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{self._path}: {name!r} was saved with the shape {list(stored.shape)}, and has "
                f"{list(tensor.shape)} here; load it into a model of the same sizes"
            )
        if stored.dtype.is_floating_point != tensor.dtype.is_floating_point:
            raise CheckpointError(
                f"{self._path}: {name!r} was saved as {stored.dtype}, and is {tensor.dtype} here"
            )
        self._values[key] = _empty(tensor, stored.dtype)

    def _plan_state(self, holding: Holding) -> None:
        for optimizer in holding.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    for key in self._state_keys(holding.name_of(parameter), optimizer, parameter).values():
                        stored = self.index.tensors.get(key)
                        if stored is not None and stored.shape == tuple(parameter.shape):
                            self._values[key] = _empty(parameter, stored.dtype)
                        elif stored is not None:
                            self._values[key] = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")

    def _state_keys(
        self, name: str, optimizer: torch.optim.Optimizer, parameter: nn.Parameter
    ) -> dict[str, str]:
        """Of the state that was saved for `name`, by its own key: the key in the checkpoint."""
        first = {each: names[0] for names in self.index.ties for each in names}
        prefix = f"{OPTIMIZER}{first.get(name, name)}."
        found = {
            key.removeprefix(prefix): key
            for key in (*self.index.tensors, *self.index.values)
            if key.startswith(prefix) and "." not in key.removeprefix(prefix)
        }
        has_master = isinstance(optimizer, OwnerOptimizer) and optimizer._masters.get(parameter) is not None
        if not has_master:
            found.pop(MASTER, None)
        return found

    def _check_aliases(self) -> None:
        """Refuse a tie both of whose names were saved, with different values."""
        assert self._holding is not None
        first = {name: names[0] for names in self.index.ties for name in names}
        for names, _ in self._holding.loaded:
            keys = list(dict.fromkeys(MODEL + first.get(name, name) for name in names))
            found = [key for key in keys if key in self._values]
            refuse_unlike(names, [self._values[key] for key in found])

    # -- what becomes of it

    @torch.no_grad()
    def fill(self) -> None:
        """Give every tensor of this rank its value. Local."""
        for key, tensor in self._keys:
            local_of(tensor).copy_(local_of(self._values[key]))

    def state_dicts(self) -> list[dict[str, Any]]:
        """For each optimizer of this rank, what its `load_state_dict` takes. Local."""
        holding = self._holding
        assert holding is not None
        return [self._state_dict(holding, number) for number in range(len(holding.optimizers))]

    def _state_dict(self, holding: Holding, number: int) -> dict[str, Any]:
        optimizer = holding.optimizers[number]
        state: dict[int, dict[str, Any]] = {}
        groups = []
        count = 0
        for place, group in enumerate(optimizer.param_groups):
            ids = list(range(count, count + len(group["params"])))
            count += len(ids)
            for index, parameter in zip(ids, group["params"], strict=True):
                found = self._state_keys(holding.name_of(parameter), optimizer, parameter)
                if found:
                    state[index] = {
                        key: self._values[full] if full in self._values else self.index.values[full]
                        for key, full in found.items()
                    }
            options = self._options(holding, number, place)
            kept = {key: value for key, value in group.items() if key != "params"}
            kept |= {key: like_option(value, kept.get(key)) for key, value in options.items()}
            groups.append({**kept, "params": ids})
        return {"state": state, "param_groups": groups}

    def _check_options(self) -> None:
        assert self._holding is not None
        for number, optimizer in enumerate(self._holding.optimizers):
            for place in range(len(optimizer.param_groups)):
                self._options(self._holding, number, place)

    def _options(self, holding: Holding, number: int, place: int) -> Mapping[str, Any]:
        """The options that were saved for a group of this rank: those of its parameters, or its place."""
        first = {name: names[0] for names in self.index.ties for name in names}
        group = holding.optimizers[number].param_groups[place]
        names = {first.get(name, name) for name in map(holding.name_of, group["params"])}
        saved = [each for each in self.index.groups if names & set(each.parameters)]
        if not names:
            saved = [each for each in self.index.groups if each.place == (number, place)][:1]
        for each in saved[1:]:
            differing = sorted(key for key in each.options if each.options[key] != saved[0].options.get(key))
            if differing:
                raise CheckpointError(
                    f"{self._path}: the parameters of group {place} were saved with different "
                    f"{differing}; put "
                    "into one group only what was stepped alike"
                )
        return saved[0].options if saved else {}


def refuse_unlike(names: Sequence[str], values: Sequence[Tensor]) -> None:
    """Raise CheckpointError unless the `values` of a tie's `names` are one, bit for bit. Local."""
    for other in values[1:]:
        one, two = local_of(values[0]), local_of(other)
        if one.dtype != two.dtype or not same_bits(one, two):
            raise CheckpointError(
                f"{' and '.join(map(repr, names))} are one parameter here, and were saved with values "
                f"that differ by "
                f"up to {largest_difference(one, two):g}; leave one of them out"
            )


def _empty(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Room on the host for what `tensor` is to become: of a DTensor, a DTensor."""
    if is_sharded(tensor):
        return like(tensor, torch.empty_like(local_of(tensor), dtype=dtype))
    return torch.empty(tensor.shape, dtype=dtype, device="cpu")
