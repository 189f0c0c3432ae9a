"""Pipelines side by side agree on one plan, or all of them say why not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from piper_owner.data_parallel import SideGroup
from piper_owner.errors import ConfigError, ExchangeError, TieError
from piper_owner.ownership import OwnershipPlan, Scope
from piper_owner.tied import TiedParameter
from piper_owner.transport import Boards, Fabric
from piper_owner.transport.agreement import Agreement, together

__all__ = ["agree_beside", "check_alike", "check_grid", "share_averages"]


def check_grid(sides: list[list[int] | None], scope: Scope) -> None:
    """Raise ConfigError unless all ranks of a pipeline are in the same place of equal dp_groups.

    `sides` has (pipeline, number of pipelines) of every rank, or None without a dp_group. Pure.
    """
    if len({side is None for side in sides}) > 1:
        missing = [rank for rank, side in enumerate(sides) if side is None]
        raise ConfigError(f"dp_group is missing on the ranks {missing}; give it on every rank or on none")
    if sides[0] is None:
        if scope is Scope.GLOBAL:
            raise ConfigError(
                "scope='global' needs dp_group: this rank's data parallel group, such as mesh[\"dp\"]"
            )
        return
    for rank, side in enumerate(sides):
        assert side is not None
        if side[1] != sides[0][1]:
            raise ConfigError(
                f"dp_group has {sides[0][1]} ranks on rank 0 and {side[1]} on rank {rank}; every stage is in "
                "equally many pipelines"
            )
        if side[0] != sides[0][0]:
            raise ConfigError(
                f"rank 0 is number {sides[0][0]} of its dp_group and rank {rank} number {side[0]} of its; "
                "the ranks of one pipeline have the same number in their data parallel groups, as in "
                'init_device_mesh("cpu", (dp, pp), mesh_dim_names=("dp", "pp"))["dp"]'
            )


def agree_beside(
    agreement: Agreement, fabric: Fabric, sides: Sequence[SideGroup], agree: Callable[[], OwnershipPlan]
) -> OwnershipPlan:
    """The plan that `agree` makes in this pipeline, if it is that of the pipelines beside it, too.

    `agree` fills `sides`. If it fails here, the other pipelines hear of it. Widens `agreement`.
    """
    plans: list[OwnershipPlan] = []
    failures: list[Exception] = []
    try:
        plans.append(agree())
    except Exception as error:  # raised again below, once the other pipelines know
        failures.append(error)
    if not sides:
        if failures:
            raise failures[0]
        return plans[0]
    side = sides[0].fabric
    # Each with its own first: they number their ranks differently.
    fabric.board, side.board = Boards(fabric.board, side.board), Boards(side.board, fabric.board)
    try:
        group = side.group(tuple(range(side.world_size)), "agreement")
    except ExchangeError as error:
        raise (failures or [error])[0] from error

    def show() -> str:
        if failures:
            raise failures[0]
        return json.dumps({"rank": fabric.rank, "plan": plans[0].to_dict()}, sort_keys=True)

    _check_members([json.loads(text) for text in together(group, side.rank, show, who="pipeline")])
    agreement.widen(group, side)
    return plans[0]


def _check_members(found: list[dict[str, Any]]) -> None:
    """Raise unless the members of a data parallel group have one place in equal pipelines."""
    for pipeline, other in enumerate(found):
        if other["rank"] != found[0]["rank"]:
            raise ConfigError(
                f"dp_group joins rank {found[0]['rank']} of pipeline 0 to rank {other['rank']} of pipeline "
                f"{pipeline}; it is the group of the ranks that hold the same stages in all pipelines"
            )
        for what, value in other["plan"].items():
            if value != found[0]["plan"][what]:
                raise TieError(
                    f"the pipelines of dp_group differ in {what}: {found[0]['plan'][what]} in pipeline 0 and "
                    f"{value} in pipeline {pipeline}; all of them hold the same stages on the same ranks"
                )


def check_alike(everyone: list[list[str]]) -> None:
    """Raise TieError unless the ranks of every pipeline answer as those of the first do."""
    for pipeline, answers in enumerate(everyone):
        for rank, answer in enumerate(answers):
            if answer != everyone[0][rank]:
                raise TieError(
                    f"rank {rank} of pipeline {pipeline} differs from that of pipeline 0: {answer} against "
                    f"{everyone[0][rank]}; wrap, list and step a tie in all pipelines in the same way"
                )


def share_averages(plan: OwnershipPlan, tied: Mapping[str, TiedParameter], averaged: Sequence[str]) -> None:
    """Say in `tied` which gradients are averages already. Local.

    With an owner per pipeline, leave out the average of a sum only if all its shares are:
    `averaged` has, by rank, the names of ties as JSON.
    """
    if plan.scope is Scope.PIPELINE:
        names = [json.loads(text) for text in averaged]
        for name, tie in tied.items():
            tie.is_averaged = all(name in names[rank] for rank in tie.plan.ranks)
