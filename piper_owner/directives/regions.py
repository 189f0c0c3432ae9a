"""Which regions and microbatches a filter picks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from piper_owner.directives.model import MICROBATCH_TAG, PASS_TAG, Filter, Program, Split
from piper_owner.errors import ConfigError

__all__ = ["Picked", "Regions", "Splitting", "name_region", "read_split"]

Picked = tuple[tuple[int, ...], range]
"""Stages, ascending, and microbatches."""

_SHOWN: Final = 8


class Splitting:
    """Into how many microbatches the step is split, and which tags name their index."""

    def __init__(self, num_microbatches: int, names: frozenset[str]) -> None:
        self.num_microbatches = num_microbatches
        self.names = names


class Regions:
    """The regions of a model, in trace order, and what filters of `program` pick of them."""

    def __init__(self, program: Program, tags: Sequence[Mapping[str, int]]) -> None:
        if not tags:
            raise ConfigError("a schedule program needs a model with at least one region")
        self.program = program
        self.tags = tags
        # By tag and index: the stages that carry it.
        self.carriers: dict[str, dict[int, list[int]]] = {}
        for stage, own in enumerate(tags):
            for name, index in own.items():
                if name in (PASS_TAG, MICROBATCH_TAG):
                    raise ConfigError(
                        f"region {stage} is annotated {name!a}, which names a pass or a microbatch in "
                        "filters; choose another tag"
                    )
                self.carriers.setdefault(name, {}).setdefault(index, []).append(stage)
        self._stages: dict[tuple[tuple[str, int | None], ...], tuple[int, ...]] = {}

    def whole(self, directive: int, picked: Filter, op: str) -> tuple[int, ...]:
        """The stages that the filter of a `place`, `replicate` or `split` picks; at least one.

        Raises DirectiveError for a tag or index that no region has, and for a filter on microbatches
        or passes.
        """
        if picked.part is not None or any(
            name == MICROBATCH_TAG for name, index in picked.tags if index is not None
        ):
            raise self.program.error(
                directive,
                f"{op} takes whole regions, with all their passes and microbatches: leave "
                f'"{PASS_TAG}" and "{MICROBATCH_TAG}" out of its filter',
            )
        return self.stages(directive, tuple(tag for tag in picked.tags if tag[0] != MICROBATCH_TAG))

    def stages(self, directive: int, tags: tuple[tuple[str, int | None], ...]) -> tuple[int, ...]:
        """The stages that carry all of `tags`; at least one, else DirectiveError."""
        known = self._stages.get(tags)
        if known is not None:
            return known
        found: set[int] | None = None
        for name, index in tags:
            indices = self.carriers.get(name)
            if indices is None:
                raise self.program.error(
                    directive,
                    f"no region has the tag {name!a}; the tags of the model are {self._known_tags()}",
                )
            if index is not None and index not in indices:
                raise self.program.error(
                    directive, f"no region has {name!a} {index}; the model has {name!a} {_indices(indices)}"
                )
            carrying = indices.values() if index is None else (indices[index],)
            these = {stage for stages in carrying for stage in stages}
            found = these if found is None else found & these
        if found is None:
            found = set(range(len(self.tags)))
        if not found:
            raise self.program.error(
                directive,
                f"no region has {' and '.join(_tag(tag) for tag in tags)} together; the regions are "
                + "; ".join(name_region(own) for own in self.tags[:_SHOWN])
                + (" ..." if len(self.tags) > _SHOWN else ""),
            )
        stages = self._stages[tags] = tuple(sorted(found))
        return stages

    def picked(self, directive: int, picked: Filter, splitting: Splitting) -> Picked:
        """What the filter of an `order` picks; raises DirectiveError if that is nothing."""
        tags, microbatch = [], None
        for name, index in picked.tags:
            if name not in splitting.names:
                tags.append((name, index))
            elif index is not None:
                if microbatch not in (None, index):
                    raise self.program.error(
                        directive, f"a filter names two microbatches, {microbatch} and {index}; name one"
                    )
                microbatch = index
        stages = self.stages(directive, tuple(tags))
        if microbatch is None:
            return stages, range(splitting.num_microbatches)
        if microbatch >= splitting.num_microbatches:
            raise self.program.error(
                directive,
                f"there is no microbatch {microbatch}: the batch is split into {splitting.num_microbatches}, "
                f'0 to {splitting.num_microbatches - 1}; a "split" directive gives more',
            )
        return stages, range(microbatch, microbatch + 1)

    def _known_tags(self) -> str:
        return ", ".join(f"{name!a}" for name in [*sorted(self.carriers)[:_SHOWN], MICROBATCH_TAG, PASS_TAG])


def read_split(regions: Regions) -> Splitting:
    """How the program splits the batch; one microbatch where it does not say.

    Raises DirectiveError for a second split, for one that leaves a region out, and for a name of the
    microbatches that is a tag of the model.
    """
    program = regions.program
    first: int | None = None
    splitting = Splitting(1, frozenset({MICROBATCH_TAG}))
    for index, directive in enumerate(program.directives):
        if not isinstance(directive, Split):
            continue
        stages = regions.whole(index, directive.filter, "split")
        if first is not None:
            raise program.error(
                index, f"the batch is split already, by {program.quote(first)}; keep one of the two"
            )
        if len(stages) < len(regions.tags):
            left = next(stage for stage in range(len(regions.tags)) if stage not in stages)
            raise program.error(
                index,
                f"it splits some regions and not others, such as {name_region(regions.tags[left])}: every "
                'region runs the same microbatches here; use "filter": {}',
            )
        if directive.dim_name in regions.carriers:
            raise program.error(
                index,
                f"the microbatches are called {directive.dim_name!a}, which is a tag of the model; choose "
                f'another "dim_name", such as "{MICROBATCH_TAG}"',
            )
        first = index
        splitting = Splitting(directive.num_microbatches, frozenset({MICROBATCH_TAG, directive.dim_name}))
    return splitting


def name_region(tags: Mapping[str, int]) -> str:
    """A region by its tags, such as `PP 2`."""
    return " ".join(f"{_plain(name)} {index}" for name, index in tags.items()) or "one without tags"


def _tag(tag: tuple[str, int | None]) -> str:
    name, index = tag
    return f"{_plain(name)} {'*' if index is None else index}"


def _plain(name: str) -> str:
    return name.encode("ascii", "backslashreplace").decode("ascii")


def _indices(indices: Mapping[int, object]) -> str:
    known = sorted(indices)
    if len(known) > 2 and known == list(range(known[0], known[-1] + 1)):
        return f"{known[0]} to {known[-1]}"
    return ", ".join(map(str, known[:_SHOWN])) + (" ..." if len(known) > _SHOWN else "")
