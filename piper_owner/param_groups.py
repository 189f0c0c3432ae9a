"""Parameter groups as users give them to an optimizer, in one form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from piper_owner.errors import ConfigError, TieError

__all__ = [
    "check_class",
    "check_dtypes",
    "check_listing",
    "check_made",
    "hyperparameters",
    "normalised_groups",
    "options_of",
    "without",
]


def normalised_groups(params: Any, *, taken: Iterable[Tensor] = ()) -> list[dict[str, Any]]:  # noqa: ANN401
    """`params` as a list of groups, each with a list of `params` and, if named, `param_names`.

    Takes tensors, (name, tensor) pairs or groups of them; an empty list is one empty group. A
    parameter twice in one group counts once.

    Raises ConfigError for a parameter in two groups, or in `taken`.
    """
    if isinstance(params, Tensor):
        raise ConfigError("params is one tensor; give an iterable of parameters, such as model.parameters()")
    listed = list(params)
    if not listed or not isinstance(listed[0], Mapping):
        listed = [{"params": listed}]
    groups = [_one_group(group) for group in listed]
    seen: dict[int, str] = {id(parameter): "an earlier group" for parameter in taken}
    named = any("param_names" in group for group in groups)
    for index, group in enumerate(groups):
        if named:
            group.setdefault("param_names", [])
        for parameter in group["params"]:
            if id(parameter) in seen:
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} is in group {index} and in "
                    f"{seen[id(parameter)]}; put it into one. A tied parameter is one, whatever its names"
                )
            seen[id(parameter)] = f"group {index}"
    return groups


def _one_group(group: Mapping[str, Any]) -> dict[str, Any]:
    params = group["params"]
    items = [params] if isinstance(params, Tensor) else list(params)
    named = [item if isinstance(item, tuple) else (None, item) for item in items]
    unique = {id(parameter): (name, parameter) for name, parameter in reversed(named)}
    kept = list(reversed(unique.values()))
    result = {**group, "params": [parameter for _, parameter in kept]}
    if any(name is not None for name, _ in kept):
        result["param_names"] = [name for name, _ in kept]
    return result


def without(groups: Iterable[dict[str, Any]], drop: Callable[[Tensor], bool]) -> list[dict[str, Any]]:
    """Copies of `groups` without the parameters for which `drop` is true; an emptied group stays."""
    result = []
    for group in groups:
        keep = [index for index, parameter in enumerate(group["params"]) if not drop(parameter)]
        copy = {**group, "params": [group["params"][index] for index in keep]}
        if "param_names" in group:
            copy["param_names"] = [group["param_names"][index] for index in keep]
        result.append(copy)
    return result


def hyperparameters(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that decide its step, in a form that compares across ranks."""
    plain: dict[str, Any] = {}
    for key, value in options.items():
        if key in ("params", "param_names"):
            continue
        if isinstance(value, torch.Tensor):
            plain[key] = value.tolist()
        elif isinstance(value, list | tuple):
            plain[key] = list(value)
        elif value is None or isinstance(value, bool | int | float | str):
            plain[key] = value
    return plain


def options_of(
    parameters: Mapping[str, Tensor], groups: Iterable[Mapping[str, Any]], inner: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """By name, the options with which `inner` steps those of `parameters` that `groups` list."""
    found = {}
    for name, parameter in parameters.items():
        for group in groups:
            if any(p is parameter for p in group["params"]):
                options = {**inner.defaults, **{k: v for k, v in group.items() if k in inner.defaults}}
                found[name] = {**hyperparameters(options), "class": type(inner).__name__}
    return found


def check_class(optimizer_class: object) -> None:
    """Raise ConfigError for an optimizer class that cannot step a tie on one rank alone."""
    if not isinstance(optimizer_class, type):
        return
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")  # type: ignore[attr-defined]
    if issubclass(optimizer_class, torch.optim.LBFGS) or (
        closure is not None and closure.default is inspect.Parameter.empty
    ):
        raise ConfigError(
            f"{optimizer_class.__name__} evaluates the whole model several times in one step and mixes all "
            "parameters, so one rank cannot step a tie alone; use a first-order optimizer"
        )


def check_made(inner: torch.optim.Optimizer) -> None:
    """Raise ConfigError for an optimizer, from a class or a function, that cannot be wrapped.

    A tie is stepped by the `step` of the class, in slices too, so what one object adds would be lost.
    """
    check_class(type(inner))
    added = [
        what
        for what, is_there in (
            ("step pre-hooks", getattr(inner, "_optimizer_step_pre_hooks", None)),
            ("step post-hooks", getattr(inner, "_optimizer_step_post_hooks", None)),
            ("a step of its own", "step" in vars(inner)),
        )
        if is_there
    ]
    if added:
        raise ConfigError(
            f"the {type(inner).__name__} to be wrapped has {' and '.join(added)}, which would not run for "
            "ties. Register hooks on the OwnerOptimizer, and put another step into a subclass"
        )


def check_dtypes(**dtypes: object) -> None:
    """Raise ConfigError for an option that is neither None nor a torch.dtype of floating point."""
    for option, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(
                f"{option}={dtype!r}: gradients and weights need a torch.dtype of floating point, such as "
                "torch.float32; None stands for the parameter's own"
            )


def check_listing(name: str, listings: Mapping[int, dict[str, Any] | None]) -> None:
    """Raise TieError unless every holder of tie `name` lists it, with equal options, or none does."""
    listed = [rank for rank, listing in listings.items() if listing is not None]
    missing = [rank for rank, listing in listings.items() if listing is None]
    if listed and missing:
        raise TieError(
            f"tie {name!r} is listed by the optimizer on the ranks {listed} and not on the ranks {missing}, "
            "which hold it too; list it on all of them"
        )
    for rank in listed[1:]:
        mine, theirs = listings[listed[0]] or {}, listings[rank] or {}
        for key in sorted({*mine, *theirs}):
            if mine.get(key) != theirs.get(key):
                raise TieError(
                    f"tie {name!r}: {key} is {mine.get(key)!r} on rank {listed[0]} and {theirs.get(key)!r} "
                    f"on rank {rank}; put the tied parameter into groups with the same options on both"
                )
