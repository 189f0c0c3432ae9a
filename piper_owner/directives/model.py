"""What a schedule program says: directives, and the filters by which they pick parts of a step.

A model is annotated in regions, which carry tags such as `PP` 2; a step runs each region's
forward and backward for each microbatch. A directive picks some of these by a filter and says
where they run (`place`), on how many pipelines (`replicate`), in how many microbatches (`split`)
or when (`order`).
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, assert_never

from piper_owner.errors import DirectiveError

__all__ = [
    "MICROBATCH_TAG", "PASS_TAG", "Directive", "Filter", "Order", "Pass", "Place", "Program", "Replicate",
    "Split", "directive_json", "filter_json", "shorten",
]  # fmt: skip

PASS_TAG: Final = "PASS"
MICROBATCH_TAG: Final = "MB"
_HEAD: Final = 120
_TAIL: Final = 36


class Pass(enum.Enum):
    """Which part of a region's work: its forward, its backward, or one half of a split backward.

    BACKWARD is the whole backward, both halves where it is split.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "BI"
    BACKWARD_WEIGHT = "BW"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """A conjunction: every tag listed has the index listed, and the pass is `part`.

    `tags` are (name, index) by ascending name; an index of None stands for `"*"`: any index, but the
    region must carry the tag. A tag that is not listed may have any index or be absent; a `part` of
    None is any pass. An empty filter picks everything.
    """

    tags: tuple[tuple[str, int | None], ...] = ()
    part: Pass | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The regions of `filter` run on `devices`, one device for each pipeline.

    `stream` is accepted and has no effect: messages of a pair of ranks have one order here.
    """

    filter: Filter
    devices: tuple[int, ...]
    stream: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    """The regions of `filter` run in as many data parallel pipelines as there are `devices`.

    Pipeline k runs them on `devices[k]`. `reduce_stream`, `gather_stream` and `bucket_size` are
    accepted and have no effect on the result.
    """

    filter: Filter
    devices: tuple[int, ...]
    reduce_stream: str | None = None
    gather_stream: str | None = None
    bucket_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The batch of the regions of `filter` is cut into `num_microbatches`.

    Filters name the index of a microbatch by the tag `dim_name`, or by `MB`.
    """

    filter: Filter
    num_microbatches: int
    dim_name: str = MICROBATCH_TAG


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the filters of a group pick has ended before anything of the next group starts.

    Filters within a group may interleave.
    """

    groups: tuple[tuple[Filter, ...], ...]


Directive = Place | Replicate | Split | Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A schedule program: directives in the order of the file, which has no meaning of its own.

    `source` says in errors where the program comes from; `texts` are the directives as the file
    spells them, and are made from the directives where there is no file.
    """

    directives: tuple[Directive, ...]
    source: str = field(default="program", compare=False)
    texts: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def quote(self, index: int) -> str:
        """`directive[3] {"op": "place", ...}`: the index and, shortened to one line, the text."""
        text = self.texts[index] if self.texts else json.dumps(directive_json(self.directives[index]))
        return f"directive[{index}] {shorten(text)}"

    def error(self, index: int, what: str) -> DirectiveError:
        """The error that `what` is wrong with a directive, for the caller to raise."""
        return DirectiveError(f"{self.source}: {self.quote(index)}: {what}")

    def orders(self) -> Iterator[tuple[int, Order]]:
        """The `order` directives, with their index."""
        for index, directive in enumerate(self.directives):
            if isinstance(directive, Order):
                yield index, directive


def shorten(text: str) -> str:
    """`text` on one line of plain ASCII, its middle left out where it is long."""
    line = " ".join(text[: 8 * _HEAD].split())
    if len(text) > 8 * _HEAD or len(line) > _HEAD + _TAIL + 5:
        tail = " ".join(text[-4 * _TAIL :].split())
        line = f"{line[:_HEAD]} ... {tail[-_TAIL:]}"
    return line.encode("ascii", "backslashreplace").decode("ascii")


def filter_json(filter_: Filter) -> dict[str, int | str]:
    """The filter as JSON has it: tags of the model, then `MB`, then `PASS`."""
    tags = sorted(filter_.tags, key=lambda tag: (tag[0] == MICROBATCH_TAG, tag[0]))
    value: dict[str, int | str] = {name: "*" if index is None else index for name, index in tags}
    if filter_.part is not None:
        value[PASS_TAG] = filter_.part.value
    return value


def directive_json(directive: Directive) -> Mapping[str, Any]:
    """The directive as JSON has it; options that are not set are left out."""
    value: dict[str, Any]
    match directive:
        case Place(filter=picked, devices=devices, stream=stream):
            value = {"op": "place", "filter": filter_json(picked), "devices": list(devices), "stream": stream}
        case Replicate(filter=picked, devices=devices):
            value = {
                "op": "replicate",
                "filter": filter_json(picked),
                "devices": list(devices),
                "reduce_stream": directive.reduce_stream,
                "gather_stream": directive.gather_stream,
                "bucket_size": directive.bucket_size,
            }
        case Split(filter=picked, num_microbatches=count, dim_name=name):
            value = {
                "op": "split", "filter": filter_json(picked), "dim_name": name, "num_microbatches": count,
            }  # fmt: skip
        case Order(groups=groups):
            value = {"op": "order", "filters": [[filter_json(f) for f in group] for group in groups]}
        case _:
            assert_never(directive)
    return {name: item for name, item in value.items() if item is not None}
