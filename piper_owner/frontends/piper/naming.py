"""Name every parameter in every segment that uses it, and find the ties: by identity, never by spelling."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import fx, nn
from torch.nn import functional

from piper_owner.frontends.piper.analysis import Facts
from piper_owner.frontends.piper.capture import Captured
from piper_owner.ownership import Tie
from piper_owner.stages import full_name
from piper_owner.ties import find_ties

__all__ = ["Lookup", "Names", "ParameterUse", "Uses", "lookup_of", "name_parameters", "suffixed"]

_ROOT: Final = "L['model']"
"""How Dynamo calls the argument of the function that `capture` traces."""

_KEEPING_VALUES: Final = frozenset(
    {
        "clone", "contiguous", "detach", "expand", "flatten", "flip", "int", "long", "repeat",
        "repeat_interleave", "reshape", "roll", "to", "view",
    }
)  # fmt: skip
"""Methods whose result holds no value that its input does not hold."""
_KEEPING_FUNCTIONS: Final = frozenset(
    {torch.cat, torch.clone, torch.concat, torch.flatten, torch.flip, torch.reshape, torch.roll, torch.stack}
)


class Uses(enum.Enum):
    """What one use of a parameter needs."""

    KNOWN_ROWS = "rows by ids that are among the inputs of the model"
    ROWS = "rows by ids that are computed"
    WHOLE = "all of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """The settings of one call of F.embedding, as nn.Embedding takes them."""

    ids: fx.Node
    weight: fx.Node
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool

    @property
    def settings(self) -> tuple[int | None, float | None, float, bool, bool]:
        """What two lookups by one module must agree on."""
        return (self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUse:
    """One operation of one segment that takes a parameter, or None where the segment returns it."""

    parameter: fx.Node
    node: fx.Node | None
    uses: Uses
    lookup: Lookup | None = None
    inputs: frozenset[int] = frozenset()
    """With KNOWN_ROWS, the inputs of the model that hold the ids."""


@dataclass(slots=True)
class Names:
    """The names of parameters and buffers in the segments."""

    by_use: dict[tuple[int, fx.Node | None, fx.Node], str] = field(default_factory=dict)
    """(segment, operation, placeholder) -> name."""
    extra: dict[int, dict[str, nn.Parameter]] = field(default_factory=dict)
    """By segment, names of the model by which no operation reaches the parameter."""
    ties: tuple[Tie, ...] = ()


def lookup_of(node: fx.Node) -> Lookup | None:
    """What `node` looks up, if it is an F.embedding of a placeholder."""
    if node.op != "call_function" or node.target is not functional.embedding:
        return None
    order = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given: dict[str, object] = {**dict(zip(order, node.args, strict=False)), **node.kwargs}
    ids, weight = given["input"], given["weight"]
    if not (isinstance(ids, fx.Node) and isinstance(weight, fx.Node) and weight.op == "placeholder"):
        return None
    padding, max_norm, norm_type = (
        given.get("padding_idx"),
        given.get("max_norm"),
        given.get("norm_type", 2.0),
    )
    assert isinstance(norm_type, int | float)
    return Lookup(
        ids=ids,
        weight=weight,
        padding_idx=padding if isinstance(padding, int) else None,
        max_norm=max_norm if isinstance(max_norm, int | float) else None,
        norm_type=norm_type,
        scale_grad_by_freq=bool(given.get("scale_grad_by_freq", False)),
        sparse=bool(given.get("sparse", False)),
    )


def sources_of_ids(ids: fx.Node, captured: Captured, facts: Facts) -> frozenset[int] | None:
    """The inputs of the model among whose values those of `ids` are, if that is certain."""
    if ids in captured.inputs:
        return frozenset({captured.inputs[ids]})
    if ids.op == "placeholder" or ids.op == "get_attr" or ids in facts.writes or facts.is_written(ids):
        return None
    value, tensors = facts.values[ids], ids.all_input_nodes
    if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.dtype is torch.bool):
        return None
    is_kept = ids.target in (_KEEPING_VALUES if ids.op == "call_method" else _KEEPING_FUNCTIONS)
    same_type = all(facts.values[each].dtype is value.dtype for each in tensors if _has_dtype(facts, each))
    # A view by another dtype reads the same bytes as other numbers.
    if not tensors or not (is_kept or (facts.is_view(ids) and (same_type or not hasattr(value, "dtype")))):
        return None
    if ids.target == "view" and not same_type:
        return None
    found: set[int] = set()
    for each in tensors:
        sources = sources_of_ids(each, captured, facts)
        if sources is None:
            return None
        found |= sources
    return frozenset(found)


def _has_dtype(facts: Facts, node: fx.Node) -> bool:
    return isinstance(facts.values[node], torch.Tensor)


def suffixed(name: str, tag: str, segment: int) -> str:
    """`layer.linear.weight` -> `layer.linear@PP2.weight`: the name of a further use of one parameter.

    The mark is on the module, so that an nn.Embedding's weight stays one.
    """
    path, _, leaf = name.rpartition(".")
    mark = f"@{tag}{segment}"
    return f"{path}{mark}.{leaf}" if path else f"{leaf}{mark}"


def name_parameters(
    model: nn.Module, captured: Captured, used: Sequence[Sequence[ParameterUse]], tag: str
) -> Names:
    """Names for the parameters of each segment. Local.

    A segment holds a parameter under the names of the modules by which its operations reach it. Where that
    tells nothing (a functional call) or the name is an earlier segment's, it takes a name of the model
    that no segment has, or else the first name with the segment's mark: `layer.linear@PP2.weight`. So the
    names of a tie are all different, also for a shared layer that has one name in the model. A name by
    which no operation reaches the parameter goes to the first segment that uses it; a parameter that
    none uses, to segment 0.

    Raises TieError as `find_ties`.
    """
    find_ties(model)
    names_of: dict[int, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), {})[full_name(name)] = parameter
    placeholder_of = {
        id(value): node for node, value in captured.tensors.items() if isinstance(value, nn.Parameter)
    }
    names, ties = Names(), []
    for key, places in names_of.items():
        mine = {
            segment: found
            for segment, uses in enumerate(used)
            if (found := [use for use in uses if use.parameter is placeholder_of.get(key)])
        }
        all_names = _name_one(names, mine, places, tag)
        if len(all_names) > 1:
            ties.append(Tie(tuple(all_names)))
    names.ties = tuple(ties)
    return names


def _name_one(
    names: Names, mine: Mapping[int, Sequence[ParameterUse]], places: Mapping[str, nn.Parameter], tag: str
) -> list[str]:
    """Name every use of one parameter, `mine` by segment; all its names, those of the model first."""
    model_names = list(places)
    first = min(mine, default=0)
    taken: dict[str, int] = {}
    reached: dict[int, dict[fx.Node | None, str]] = {}
    for segment, uses in mine.items():
        paths = {use.node: _reached_by(use, model_names, is_first=segment == first) for use in uses}
        reached[segment] = {
            each: name for each, name in paths.items() if name and taken.setdefault(name, segment) == segment
        }
    added: list[str] = []
    for segment, uses in mine.items():
        for use in uses:
            known = reached[segment]
            name = known.get(use.node) or _spare_name(use, segment, known, model_names, taken, tag)
            if taken.setdefault(name, segment) == segment and name not in (*model_names, *added):
                added.append(name)
            known.setdefault(use.node, name)
            names.by_use[segment, use.node, use.parameter] = name
    for name, parameter in places.items():
        if name not in taken:
            names.extra.setdefault(first, {})[name] = parameter
    return [*model_names, *added]


def _spare_name(
    use: ParameterUse,
    segment: int,
    reached: Mapping[fx.Node | None, str],
    model_names: Sequence[str],
    taken: Mapping[str, int],
    tag: str,
) -> str:
    """A name for a use that no module's name tells: one that the segment has, a free one, or a new one."""
    here = list(dict.fromkeys(reached.values()))
    wanted = _reached_by(use, model_names, is_first=False)
    if here and wanted is None:
        return here[-1]
    marked = suffixed(wanted or model_names[0], tag, segment)
    if marked in here or wanted is not None:
        return marked
    free = [name for name in model_names if name not in taken]
    # Where the whole is used, a name that no lookup has; the first name is the one that loads.
    return free[-1 if use.uses is Uses.WHOLE and taken else 0] if free else marked


def _reached_by(use: ParameterUse, model_names: Sequence[str], *, is_first: bool) -> str | None:
    """The name of the model by whose module `use` takes the parameter, if it can be told."""
    for path in _module_paths(use.node):
        for name in model_names:
            if name.rpartition(".")[0] == path:
                return name
    if len(model_names) == 1:
        return model_names[0]
    if is_first and use.node is not None and next(iter(use.parameter.users)) is use.node:
        for path in _module_paths(use.parameter):  # where Dynamo saw the parameter first
            for name in model_names:
                if name.rpartition(".")[0] == path:
                    return name
    return None


def _module_paths(node: fx.Node | None) -> Iterator[str]:
    """The paths of the modules whose forward runs `node`, the innermost first."""
    stack: Mapping[str, tuple[str, object]] = (
        node.meta.get("nn_module_stack") if node is not None else None
    ) or {}
    for path, _ in reversed(list(stack.values())):
        if path.startswith(_ROOT):
            yield full_name(path.removeprefix(_ROOT).removeprefix("."))
