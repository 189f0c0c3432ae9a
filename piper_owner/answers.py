"""What each rank says when owners are assigned, and the plan that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from piper_owner.arguments import check_names, check_uses, ties_of
from piper_owner.errors import ConfigError, TieError
from piper_owner.grid import check_grid
from piper_owner.ownership import LayoutChoice, OwnershipPlan, ParameterUse, Scope, Tie, Use, plan_ownership
from piper_owner.sharding import check_shards, describe_shards
from piper_owner.stages import NameMap
from piper_owner.ties import describe_uses, meta_names, refuse_shared_names

__all__ = ["TieLike", "describe_stages", "plan_from"]

TieLike = Tie | Sequence[str]
"""A tie, or its names."""


def describe_stages(
    stages: Mapping[int, nn.Module],
    ties: Sequence[TieLike],
    *,
    rank: int,
    names: NameMap | None,
    uses: Mapping[str, str] | None,
) -> dict[str, Any]:
    """What `rank` says of its stages (stage number -> module) and of `ties`, ready for JSON. Local."""
    wanted = ties_of(ties)
    check_names(names)
    check_uses(uses)
    refuse_shared_names(stages, wanted, names)
    found = describe_uses(stages, rank=rank, names=names, uses=_uses(uses))
    return {
        "uses": [_use_to_json(use) for use in found],
        "ties": [list(tie.names) for tie in wanted],
        "shards": describe_shards(stages, wanted, names=names),
        "meta": meta_names(stages, names),
    }


def plan_from(answers: list[dict[str, Any]], *, world_size: int) -> OwnershipPlan:
    """The plan of a pipeline from what each of its ranks says."""
    for other, answer in enumerate(answers):
        for what in ("ties", "owner", "layout", "scope"):
            if answer[what] != answers[0][what]:
                raise TieError(
                    f"assign_owners was called with {what}={answers[0][what]!r} on rank 0 and {what}="
                    f"{answer[what]!r} on rank {other}; give every rank the same"
                )
    scope = Scope(answers[0]["scope"])
    check_grid([answer["side"][0] if answer["side"] else None for answer in answers], scope)
    every_use = [_use_from_json(fields) for answer in answers for fields in answer["uses"]]
    ties = [Tie(tuple(tie)) for tie in answers[0]["ties"]]
    plan = plan_ownership(
        ties,
        every_use,
        world_size=world_size,
        owner=answers[0]["owner"],
        layout=_layout_under(scope, answers[0]["layout"]),
    )
    check_shards(plan, {other: answer["shards"] for other, answer in enumerate(answers)})
    return replace(plan, scope=scope)


def _layout_under(
    scope: Scope, layout: LayoutChoice | dict[str, LayoutChoice]
) -> LayoutChoice | dict[str, LayoutChoice]:
    """What `layout` comes to: pipelines that share one owner look up different rows."""
    if scope is Scope.PIPELINE:
        return layout
    by_name = layout if isinstance(layout, dict) else {"every tie": layout}
    for name, choice in by_name.items():
        if choice == "rows":
            raise ConfigError(
                f"layout='rows' for {name} with scope='global': each pipeline looks other rows up, and a "
                "dense holder of its own serves them; use scope='pipeline' with dp_group, or layout='dense'"
            )
    return "dense"


def _uses(uses: Mapping[str, str] | None) -> dict[str, Use]:
    known = [use.value for use in Use]
    for name, use in (uses or {}).items():
        if use not in known:
            raise ConfigError(f"uses[{name!r}] is {use!r}; choose one of {known}")
    return {name: Use(use) for name, use in (uses or {}).items()}


def _use_to_json(use: ParameterUse) -> list[Any]:
    return [use.name, use.rank, use.stage, list(use.shape), use.dtype, use.requires_grad, use.use.value]


def _use_from_json(fields: list[Any]) -> ParameterUse:
    name, rank, stage, shape, dtype, requires_grad, use = fields
    return ParameterUse(
        name=name,
        rank=rank,
        stage=stage,
        shape=tuple(shape),
        dtype=dtype,
        requires_grad=requires_grad,
        use=Use(use),
    )
