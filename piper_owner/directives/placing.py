"""Where regions run: `place` and `replicate`, as ranks of one pipeline and devices of all of them.

`replicate` makes as many equal pipelines as it lists devices. Pipeline k runs a region on the
k-th device of its list, so the lists of all regions have one length, two regions that share a
device in one pipeline share one in each, and no device works for two pipelines.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from piper_owner.directives.model import Place, Program, Replicate, shorten
from piper_owner.directives.regions import Regions, name_region
from piper_owner.errors import DirectiveError

__all__ = ["Placed", "read_places"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The rank of each stage, and, by pipeline and rank, the device that the program names."""

    placement: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The devices of one region, a pipeline each, and the directive that lists them."""

    devices: tuple[int, ...]
    directive: int


def read_places(regions: Regions) -> Placed:
    """Where the program runs each region. Ranks are those of pipeline 0, by ascending device.

    Raises DirectiveError for a region that is placed twice, or nowhere, or on several devices
    without `replicate`; for `place` and `replicate` that disagree; and for pipelines that are not
    equal.
    """
    program = regions.program
    groups = _groups(regions)
    for group, tags in zip(groups, regions.tags, strict=True):
        if len(group.devices) != len(groups[0].devices):
            raise program.error(
                group.directive,
                f"it runs {name_region(tags)} in {_pipelines(group)}, but "
                f"{program.quote(groups[0].directive)} runs {name_region(regions.tags[0])} in "
                f"{_pipelines(groups[0])}: every region runs once in each pipeline; list as many devices",
            )
    rank_of = {device: rank for rank, device in enumerate(sorted({group.devices[0] for group in groups}))}
    placement = tuple(rank_of[group.devices[0]] for group in groups)
    return Placed(placement=placement, devices=_devices(program, groups, placement, len(rank_of)))


def _pipelines(group: _Group) -> str:
    return "one pipeline" if len(group.devices) == 1 else f"{len(group.devices)} pipelines"


def _groups(regions: Regions) -> list[_Group]:
    """By stage: its devices."""
    program = regions.program
    places: dict[int, tuple[int, Place]] = {}
    copies: dict[int, tuple[int, Replicate]] = {}
    for index, directive in enumerate(program.directives):
        if isinstance(directive, Place):
            for stage in regions.whole(index, directive.filter, "place"):
                if stage in places:
                    raise _twice(regions, index, stage, places[stage][0], "placed")
                places[stage] = (index, directive)
        elif isinstance(directive, Replicate):
            for stage in regions.whole(index, directive.filter, "replicate"):
                if stage in copies:
                    raise _twice(regions, index, stage, copies[stage][0], "replicated")
                copies[stage] = (index, directive)
    groups = []
    for stage, tags in enumerate(regions.tags):
        if stage not in places:
            tagged = json.dumps(dict(tags))
            raise DirectiveError(
                f"{program.source}: none of its {len(program.directives)} directives places "
                f"{name_region(tags)}; "
                f'add {{"op": "place", "filter": {tagged}, "devices": [0]}}, with its device'
            )
        groups.append(_group(regions, stage, places[stage], copies.get(stage)))
    return groups


def _twice(regions: Regions, index: int, stage: int, first: int, verb: str) -> DirectiveError:
    return regions.program.error(
        index,
        f"{name_region(regions.tags[stage])} is {verb} already, by {regions.program.quote(first)}; keep one "
        "of the two",
    )


def _group(
    regions: Regions, stage: int, placed: tuple[int, Place], copied: tuple[int, Replicate] | None
) -> _Group:
    program, region = regions.program, name_region(regions.tags[stage])
    index, place = placed
    if copied is None:
        if len(place.devices) > 1:
            raise program.error(
                index,
                f"it lists {len(place.devices)} devices for {region}, and no replicate directive makes "
                'copies of that: list one device, or add a "replicate" directive with the same filter and '
                "devices",
            )
        return _Group(devices=place.devices, directive=index)
    devices = copied[1].devices
    if place.devices not in (devices, devices[:1]):
        raise program.error(
            copied[0],
            f"it runs {region} on devices {_list(devices)}, but {program.quote(index)} puts it on "
            f"{_list(place.devices)}: let place list the same devices, or the first of them",
        )
    return _Group(devices=devices, directive=copied[0])


def _list(devices: tuple[int, ...]) -> str:
    return shorten(str(list(devices)))


def _devices(
    program: Program, groups: list[_Group], placement: tuple[int, ...], num_ranks: int
) -> tuple[tuple[int, ...], ...]:
    """By pipeline and rank: the device. Raises DirectiveError where pipelines differ or overlap."""
    # By device: which pipeline and rank it is, and the directive that said so.
    taken: dict[int, tuple[int, int, int]] = {}
    devices: list[dict[int, tuple[int, int]]] = [{} for _ in groups[0].devices]
    for group, rank in zip(groups, placement, strict=True):
        for pipeline, device in enumerate(group.devices):
            other, first = devices[pipeline].setdefault(rank, (device, group.directive))
            if other != device:
                raise program.error(
                    group.directive,
                    f"pipeline {pipeline} would run on devices {other} and {device} what pipeline 0 runs on "
                    f"device {group.devices[0]} (see {program.quote(first)}): pipelines are equal; regions "
                    "that share a device in one share one in all",
                )
            there = taken.setdefault(device, (pipeline, rank, group.directive))
            if there[:2] != (pipeline, rank):
                raise program.error(
                    group.directive,
                    f"device {device} would work for pipeline {pipeline}, but {program.quote(there[2])} "
                    f"has it work for {'another device of ' if there[0] == pipeline else ''}pipeline "
                    f"{there[0]}: every pipeline has devices of its own, equally many",
                )
    return tuple(tuple(found[rank][0] for rank in range(num_ranks)) for found in devices)
