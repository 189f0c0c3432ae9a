"""Find tied parameters in modules, and make the ones on a rank a single Parameter."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from piper_owner.errors import TieError
from piper_owner.ownership import ParameterUse, Tie, Use
from piper_owner.sharding import is_sharded, local_of
from piper_owner.stages import WRAPPERS, NameMap, full_name, named_places

__all__ = ["allocated", "describe_uses", "find_ties", "meta_names", "refuse_shared_names", "unite"]


def find_ties(model: nn.Module) -> tuple[Tie, ...]:
    """The ties of `model`: names that reach the same Parameter object, in registration order.

    Works on the meta device too. Names are those that `assign_owners` knows: without the parts of DDP,
    torch.compile and activation checkpointing. Local.

    Raises TieError for two Parameter objects that overlap in memory without being one: autograd
    would give each a gradient of its own; and for a tied name that is another parameter's without
    those parts.
    """
    names: dict[int, dict[str, None]] = {}
    distinct: dict[str, nn.Parameter] = {}
    # The model keeps every parameter alive here, so no id can have been freed and reused.
    for long_name, parameter in model.named_parameters(remove_duplicate=False):
        group = names.setdefault(id(parameter), {})
        if not group:
            distinct[long_name] = parameter
        group[full_name(long_name)] = None
    _check_overlap(distinct)
    ties = tuple(Tie(tuple(group)) for group in names.values() if len(group) > 1)
    refuse_shared_names({0: model}, ties)
    return ties


def refuse_shared_names(
    stages: Mapping[int, nn.Module], ties: Iterable[Tie], names: NameMap | None = None
) -> None:
    """Raise TieError if a name of `ties` is that of two Parameters in one of `stages`. Local."""
    wanted = {name for tie in ties for name in tie.names}
    for stage in stages.values():
        found: dict[str, tuple[str, nn.Parameter]] = {}
        for place in stage.named_modules(remove_duplicate=False):
            for leaf, parameter in place[1]._parameters.items():
                long_name = f"{place[0]}.{leaf}" if place[0] else leaf
                if parameter is None or (name := full_name(long_name, names)) not in wanted:
                    continue
                other, known = found.setdefault(name, (long_name, parameter))
                if known is not parameter:
                    raise TieError(
                        f"{other!r} and {long_name!r} are two Parameters of one stage, and both are "
                        f"{name!r} by their full name: the name parts {', '.join(sorted(WRAPPERS))} are left "
                        "out, as those of wrappers, and names= maps what remains. Rename one of the modules, "
                        "or let names= give each its own name"
                    )


def _check_overlap(parameters: Mapping[str, nn.Parameter]) -> None:
    spans: dict[tuple[str, int], list[tuple[int, int, str]]] = {}
    for name, whole in parameters.items():
        if whole.layout is not torch.strided:
            continue
        parameter = local_of(whole)
        if parameter.numel() == 0:
            continue
        start = int(parameter.storage_offset()) * parameter.element_size()
        last = sum(
            (size - 1) * int(stride) for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
        )
        stop = start + (last + 1) * parameter.element_size()
        storage = parameter.untyped_storage()
        # Storages of the meta device all begin at 0; only which one it is tells them apart.
        memory = ("meta", storage._cdata) if parameter.is_meta else ("real", storage.data_ptr())
        spans.setdefault(memory, []).append((start, stop, name))
    for group in spans.values():
        group.sort()
        reaching: list[tuple[int, str]] = []  # those whose span may go on at `start`
        for start, stop, second in group:
            reaching = [(end, name) for end, name in reaching if end > start]
            for _, first in reaching:
                if _share_bytes(local_of(parameters[first]), local_of(parameters[second])):
                    raise TieError(
                        f"{first!r} and {second!r} are two Parameters over the same memory, so each would "
                        "get half of the gradient. Assign one Parameter object to both modules "
                        "(head.weight = embed.weight); for a transposed use, transpose in forward"
                    )
            reaching.append((stop, second))


def _share_bytes(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors over one storage, whose spans of bytes overlap, have a byte in common.

    Columns of one buffer interleave without one.
    """
    if one.is_contiguous() and two.is_contiguous():
        return True
    taken = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool, device="cpu")
    _bytes_of(one, taken).fill_(True)
    return bool(_bytes_of(two, taken).any())


def _bytes_of(tensor: torch.Tensor, storage: torch.Tensor) -> torch.Tensor:
    """The part of `storage`, an element for each byte, that `tensor` takes up."""
    size = tensor.element_size()
    strides = [int(stride) * size for stride in tensor.stride()]
    return storage.as_strided((*tensor.shape, size), (*strides, 1), int(tensor.storage_offset()) * size)


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


def meta_names(stages: Mapping[int, nn.Module], names: NameMap | None = None) -> list[str]:
    """The full-model names in `stages` that only parameters on the meta device have. Local."""
    found: dict[str, bool] = {}
    for module in stages.values():
        for name, holder, leaf in named_places(module, names):
            parameter = holder._parameters[leaf]
            assert parameter is not None
            found[name] = found.get(name, True) and parameter.is_meta
    return sorted(name for name, is_meta in found.items() if is_meta)


def unite(
    stages: Mapping[int, nn.Module], tie: Tie, *, names: NameMap | None = None, may_be_meta: bool = False
) -> nn.Parameter:
    """Make all names of `tie` in `stages` one Parameter, and return it. Local.

    The one that carries the tie's earliest name stays, apart from those on the meta device; the others
    are dropped, with a warning if their values differed. A stage that has only some of the names, or
    whose modules lost their tie in `to_empty`, is tied (again).

    Raises TieError if no stage has any of the names, if all are still on the meta device (unless that
    `may_be`), if fully_shard has made them different DTensors, or if an nn.Embedding among them has
    `max_norm` set.
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
    found = [parameter for module, leaf in places if (parameter := module._parameters[leaf]) is not None]
    kept = next((parameter for parameter in found if not parameter.is_meta), found[0])
    if kept.is_meta and (is_sharded(kept) or not may_be_meta):
        raise TieError(
            f"tie {tie.names}: {places[0][1]!r} is still on the meta device; call to_empty(device=...) and "
            "load or initialise the stage that holds the first name, or put a name first that has a value"
        )
    _check_unitable(tie, kept, found)
    for module, leaf in places:  # only now, so that an error has changed nothing
        module._parameters[leaf] = kept
    _warn_if_unlike(tie, kept, found)
    return kept


def _check_unitable(tie: Tie, kept: nn.Parameter, found: Sequence[nn.Parameter]) -> None:
    for other in found:
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


def _warn_if_unlike(tie: Tie, kept: nn.Parameter, found: Sequence[nn.Parameter]) -> None:
    differing = [
        (other.detach().to(kept.device).double() - kept.detach().double())
        .abs()
        .nan_to_num(nan=math.inf)
        .max()
        for other in found
        if not (other is kept or other.is_meta or torch.equal(other.to(kept.device), kept))
    ]
    if differing:
        warnings.warn(
            f"tie {tie.names}: copies on one rank differed by up to {float(max(differing)):g} before the "
            "first step; the value of the earliest name was taken",
            stacklevel=3,
        )


def allocated(stages: Mapping[int, nn.Module], parameter: nn.Parameter) -> nn.Parameter:
    """`parameter`, or in its place, if that is on the meta device, one that has memory. Local.

    It is on the device of the other parameters of `stages`, or else on the CPU, and has no value yet.
    """
    if not parameter.is_meta:
        return parameter
    devices = [p.device for stage in stages.values() for p in stage.parameters() if not p.is_meta]
    empty = torch.empty_like(parameter, device=devices[0] if devices else torch.device("cpu"))
    made = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for stage in stages.values():
        for _, module, leaf in list(named_places(stage)):
            if module._parameters[leaf] is parameter:
                module._parameters[leaf] = made
    return made
