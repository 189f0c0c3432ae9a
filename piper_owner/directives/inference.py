"""The regions of a model that is not at hand, as far as a program tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from piper_owner.directives.model import MICROBATCH_TAG, Filter, Order, Place, Program, Split

__all__ = ["DEFAULT_TAG", "MAX_REGIONS", "infer_tags"]

DEFAULT_TAG: Final = "PP"
MAX_REGIONS: Final = 100_000


def infer_tags(program: Program) -> tuple[Mapping[str, int], ...]:
    """By stage, its annotation: what a model that fits `program` would have. Pure.

    Where the `place` filters use one tag, the regions are 0 to the highest index that they name, or
    that any filter names if they name none; so a gap is found, but a region behind the last one is
    not. Where they use several tags, there is a region for each combination that a `place` names,
    by ascending PP index.

    Raises DirectiveError for an index of `MAX_REGIONS` or more.
    """
    places = [(i, d.filter) for i, d in enumerate(program.directives) if isinstance(d, Place)]
    microbatches = {MICROBATCH_TAG, *(d.dim_name for d in program.directives if isinstance(d, Split))}
    names = sorted({name for _, picked in places for name, _ in picked.tags} - microbatches)
    if len(names) > 1:
        found = {tuple((name, i) for name, i in picked.tags if i is not None): None for _, picked in places}
        combinations = [dict(tags) for tags in found if tags]
        combinations.sort(key=lambda tags: tags.get(DEFAULT_TAG, 0))
        return tuple(combinations)
    name = names[0] if names else DEFAULT_TAG
    placed = _highest(program, name, places)
    highest = placed if placed is not None else _highest(program, name, _filters(program))
    return tuple({name: index} for index in range((highest or 0) + 1))


def _filters(program: Program) -> Iterator[tuple[int, Filter]]:
    for index, directive in enumerate(program.directives):
        if isinstance(directive, Order):
            yield from ((index, picked) for group in directive.groups for picked in group)
        else:
            yield index, directive.filter


def _highest(program: Program, name: str, filters: Iterable[tuple[int, Filter]]) -> int | None:
    """The highest index of `name` in `filters`, pairs of directive and filter; None without any."""
    highest: int | None = None
    for directive, picked in filters:
        for tag, index in picked.tags:
            if tag == name and index is not None:
                if index >= MAX_REGIONS:
                    raise program.error(
                        directive,
                        f"it names {name!a} {index}; fewer than {MAX_REGIONS} regions are supported",
                    )
                highest = index if highest is None else max(highest, index)
    return highest
