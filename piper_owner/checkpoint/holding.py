"""What one rank holds of a job: parameters, buffers and optimizer state, by names in the full model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from piper_owner.assignment import Ownership
from piper_owner.checkpoint.layout import Group
from piper_owner.errors import CheckpointError, ConfigError
from piper_owner.ownership import TiePlan
from piper_owner.rows import RowsParameter
from piper_owner.sharding import is_sharded, reshard
from piper_owner.stages import NameMap, Stage, full_name, listed_stages, numbered_stages

__all__ = ["MODEL", "OPTIMIZER", "Holding", "held_by", "hold", "like_option"]

MODEL: Final = "model."
OPTIMIZER: Final = "optimizer.state."
"""Prefixes of keys: `model.<name>`, and `optimizer.state.<name>.<state>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one rank holds. All names are those in the full model.

    `places` are the names of each tensor, parameters and persistent buffers alike: one for most, several
    for one that is reached by several, the canonical one first. `ties` are those of the whole job,
    and `elsewhere` the canonical names of those among them that another rank owns, and saves. `optimizers`
    step what this rank steps; `follows`: another pipeline saves everything that is
    no shard.
    """

    places: tuple[tuple[tuple[str, ...], Tensor], ...]
    ties: tuple[tuple[str, ...], ...] = ()
    elsewhere: frozenset[str] = frozenset()
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    follows: bool = False

    @property
    def loaded(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """The places that take a value: all but rows of a table."""
        return ((names, tensor) for names, tensor in self.places if not isinstance(tensor, RowsParameter))

    def saved(self) -> dict[str, Tensor]:
        """What this rank saves of the model, by key."""
        return {
            MODEL + names[0]: tensor.detach()
            for names, tensor in self.loaded
            if names[0] not in self.elsewhere and self._saves(tensor)
        }

    def saved_state(self) -> tuple[dict[str, Tensor], dict[str, Any], list[Group]]:
        """What this rank saves of its optimizers: tensors and other values by key, and their groups.

        Raises CheckpointError for state, or a group's option, that a checkpoint cannot keep.
        """
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        groups: list[Group] = []
        for number, optimizer in enumerate(self.optimizers):
            for place, group in enumerate(optimizer.param_groups):
                names = tuple(self.name_of(parameter) for parameter in group["params"])
                if not self.follows:
                    options = {
                        key: value for key, value in group.items() if key not in ("params", "param_names")
                    }
                    made = _plain_options(options, f"group {place} of optimizer {number}")
                    groups.append(Group(place=(number, place), parameters=names, options=made))
                for name, parameter in zip(names, group["params"], strict=True):
                    for key, value in optimizer.state.get(parameter, {}).items():
                        full = f"{OPTIMIZER}{name}.{key}"
                        if not isinstance(value, Tensor):
                            values[full] = _plain_value(value, full)
                        elif self._saves(parameter):
                            tensors[full] = value.to_dense() if value.is_sparse else value
        return tensors, {} if self.follows else values, groups

    def name_of(self, parameter: Tensor) -> str:
        """The canonical name of `parameter`. Raises ConfigError for one that is in no stage."""
        for names, tensor in self.places:
            if tensor is parameter:
                return names[0]
        raise ConfigError(
            f"the optimizer steps a parameter of shape {tuple(parameter.shape)} that is in none of the "
            f"stages that "
            "were given; give every stage of this rank"
        )

    def _saves(self, tensor: Tensor) -> bool:
        return not self.follows or is_sharded(tensor)


def hold(
    stages: Stage | Sequence[Stage],
    optimizer: torch.optim.Optimizer | None,
    ownership: Ownership | None,
    names: NameMap | None = None,
) -> Holding:
    """What this rank holds, from what a user has. Local.

    Raises ConfigError for stages or an optimizer that are none, and for a tensor on the meta device.
    """
    rank = 0 if ownership is None else ownership.rank
    world_size = 1 if ownership is None else ownership.plan.world_size
    given: object = optimizer
    if given is not None and not isinstance(given, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is a {type(given).__name__}; give the optimizer, or None for weights alone"
        )
    modules = numbered_stages(listed_stages(stages, rank), rank=rank, world_size=world_size)
    reshard(modules.values())
    plans = () if ownership is None else ownership.plan.ties
    side = None if ownership is None else ownership.exchange.side
    names = names if names is not None or ownership is None else ownership.names
    owned = {tie.name for tie in plans if ownership is not None and tie.owner == rank}
    return held_by(
        modules.values(),
        plans,
        owned,
        optimizers=() if optimizer is None else (optimizer,),
        names=names,
        follows=side is not None and not side.is_lead,
    )


def held_by(
    modules: Iterable[nn.Module],
    ties: Sequence[TiePlan],
    owned: Iterable[str],
    *,
    optimizers: Sequence[torch.optim.Optimizer],
    names: NameMap | None = None,
    follows: bool = False,
) -> Holding:
    """What a rank holds that has `modules`, and owns the ties named `owned`. Local."""
    found: dict[int, tuple[dict[str, None], Tensor]] = {}
    taken: dict[str, Tensor] = {}
    for name, tensor in _tensors(modules, names):
        if taken.setdefault(name, tensor) is not tensor:
            raise ConfigError(
                f"two tensors of this rank are both {name!r} in the full model; give each its own name "
                f"with names="
            )
        found.setdefault(id(tensor), ({}, tensor))[0][name] = None
    tied = [tie.tie.names for tie in ties]
    tie_of = {name: each for each in tied for name in each}
    places = []
    local: list[tuple[str, ...]] = []
    for mine, tensor in found.values():
        tie = next((tie_of[name] for name in mine if name in tie_of), None)
        if tie is None:
            places.append((tuple(mine), tensor))
            if len(mine) > 1:
                local.append(tuple(mine))
        else:
            places.append((tie, tensor))
    return Holding(
        places=tuple(places),
        ties=(*tied, *local),
        elsewhere=frozenset(tie.name for tie in ties) - set(owned),
        optimizers=tuple(optimizers),
        follows=follows,
    )


def _tensors(modules: Iterable[nn.Module], names: NameMap | None) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and persistent buffer in `modules`, by each of its names."""
    for stage in modules:
        for path, module in stage.named_modules(remove_duplicate=False):
            kept = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
            for leaf, tensor in (*module._parameters.items(), *kept.items()):
                if tensor is not None:
                    name = full_name(f"{path}.{leaf}" if path else leaf, names)
                    if tensor.is_meta:
                        raise ConfigError(
                            f"{name!r} is on the meta device and has no value; call "
                            f"to_empty(device=...) before"
                        )
                    yield name, tensor


# -- what JSON can keep


def _plain_options(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`options` of a group as JSON has them. Raises CheckpointError for one that it cannot keep."""
    return {key: _plain_value(value, f"option {key!r} of {where}") for key, value in options.items()}


def _plain_value(value: Any, where: str) -> Any:  # noqa: ANN401 - an option may be anything
    """`value` as JSON has it: numbers, texts, None, lists of them; a tensor of one number as that number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain_value(each, where) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, and a checkpoint keeps tensors, numbers, texts and lists "
        f"of them"
    )


def like_option(saved: Any, here: Any) -> Any:  # noqa: ANN401 - as above
    """The option `saved` in the form that `here`, the one in use, has."""
    if isinstance(here, Tensor) and not isinstance(saved, Tensor):
        return torch.full_like(here, saved)
    return tuple(saved) if isinstance(here, tuple) and isinstance(saved, list) else saved
