"""Find tied parameters in modules, and make the ones on a rank a single Parameter."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import nn

from piper_owner.errors import TieError
from piper_owner.ownership import ParameterUse, Tie, Use
from piper_owner.sharding import is_sharded, local_of
from piper_owner.stages import NameMap, named_places

__all__ = ["describe_uses", "find_ties", "unite"]


def find_ties(model: nn.Module) -> tuple[Tie, ...]:
    """The ties of `model`: names that reach the same Parameter object, in registration order.

    Works on the meta device too. Local.

    Raises TieError for two Parameter objects that overlap in memory without being one: autograd
    would give each a gradient of its own.
    """
    names: dict[int, list[str]] = {}
    distinct: dict[str, nn.Parameter] = {}
    # The model keeps every parameter alive here, so no id can have been freed and reused.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        group = names.setdefault(id(parameter), [])
        if not group:
            distinct[name] = parameter
        group.append(name)
    _check_overlap(distinct)
    return tuple(Tie(tuple(group)) for group in names.values() if len(group) > 1)


def _check_overlap(parameters: Mapping[str, nn.Parameter]) -> None:
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, whole in parameters.items():
        if whole.layout is not torch.strided:
            continue
        parameter = local_of(whole)
        if parameter.is_meta or parameter.numel() == 0:
            continue
        storage = parameter.untyped_storage()
        start = int(parameter.storage_offset()) * parameter.element_size()
        last = sum(
            (size - 1) * int(stride) for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
        )
        stop = start + (last + 1) * parameter.element_size()
        spans.setdefault(storage.data_ptr(), []).append((start, stop, name))
    for group in spans.values():
        group.sort()
        for (_, stop, first), (start, _, second) in itertools.pairwise(group):
            if start < stop:
                raise TieError(
                    f"{first!r} and {second!r} are two Parameters over the same memory, so each would get "
                    "half of the gradient. Assign one Parameter object to both modules (head.weight = "
                    "embed.weight); for a transposed use, transpose in forward"
                )


def describe_uses(
    stages: Mapping[int, nn.Module],
    *,
    rank: int,
    names: NameMap | None = None,
    uses: Mapping[str, Use] | None = None,
) -> tuple[ParameterUse, ...]:
    """How `rank` uses every parameter of its stages (stage number -> module).

    Names are those in the full model, see `stages.full_name`. The use is a lookup for the weight
    of an nn.Embedding, else dense; `uses` overrides it by full name. Local.
    """
    chosen = uses or {}
    found = []
    for stage, module in stages.items():
        for name, holder, leaf in named_places(module, names):
            parameter = holder._parameters[leaf]
            assert parameter is not None
            lookup = isinstance(holder, nn.Embedding) and leaf == "weight"
            found.append(
                ParameterUse(
                    name=name,
                    rank=rank,
                    stage=stage,
                    shape=tuple(parameter.shape),
                    dtype=str(parameter.dtype).removeprefix("torch."),
                    requires_grad=parameter.requires_grad,
                    use=chosen.get(name, Use.LOOKUP if lookup else Use.DENSE),
                )
            )
    return tuple(found)


def unite(stages: Mapping[int, nn.Module], tie: Tie, *, names: NameMap | None = None) -> nn.Parameter:
    """Make all names of `tie` in `stages` one Parameter, and return it. Local.

    The one that carries the tie's earliest name stays; the others are dropped. A stage that has
    only some of the names, or whose modules lost their tie in `to_empty`, is tied (again).

    Raises TieError if no stage has any of the names, if one is still on the meta device, if
    fully_shard has made them different DTensors, or if an nn.Embedding among them has `max_norm` set.
    """
    held = [place for stage in stages.values() for place in named_places(stage, names)]
    places = [(module, leaf) for wanted in tie.names for name, module, leaf in held if name == wanted]
    if not places:
        raise TieError(f"none of the stages {sorted(stages)} has a parameter of the tie {tie.names}")
    for module, _ in places:
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise TieError(
                f"tie {tie.names}: the embedding has max_norm={module.max_norm}, which rewrites the weight "
                "inside forward, on one rank only. Leave max_norm out and clip or normalise after the step"
            )
    kept = places[0][0]._parameters[places[0][1]]
    assert kept is not None
    for module, leaf in places:
        other = module._parameters[leaf]
        assert other is not None
        if other.is_meta:
            raise TieError(
                f"tie {tie.names}: {leaf!r} is still on the meta device; call to_empty(device=...) and load "
                "or initialise the stage first"
            )
        if other is not kept and (is_sharded(other) or is_sharded(kept)):
            raise TieError(
                f"tie {tie.names}: fully_shard was called on parameters of one rank that were not tied "
                "yet, and it keeps a shard of each. Tie them first (head.weight = embed.weight), then call "
                "fully_shard on a module that holds both"
            )
        if (
            other.shape != kept.shape
            or other.dtype != kept.dtype
            or other.requires_grad != kept.requires_grad
        ):
            raise TieError(
                f"tie {tie.names}: a stage holds {tuple(other.shape)} {other.dtype} requires_grad="
                f"{other.requires_grad} where another holds {tuple(kept.shape)} {kept.dtype} requires_grad="
                f"{kept.requires_grad}; tied parameters are one parameter and must agree"
            )
    for module, leaf in places:  # only now, so that an error has changed nothing
        module._parameters[leaf] = kept
    return kept
