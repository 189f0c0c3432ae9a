"""Schedule programs for tests, in short, and models to lower them for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from piper_owner.dag.graph import Bucket
from piper_owner.directives import Lowered, lower_program, parse_program

Directive = dict[str, Any]


def place(stage: int | str, *devices: int) -> Directive:
    return {"op": "place", "filter": {"PP": stage}, "devices": list(devices)}


def replicate(stage: int | str, *devices: int) -> Directive:
    return {"op": "replicate", "filter": {"PP": stage}, "devices": list(devices)}


def split(count: int) -> Directive:
    return {"op": "split", "filter": {}, "num_microbatches": count}


def picked(text: str) -> dict[str, Any]:
    """The filter of a compute such as `2BI0`; `*` or nothing for a tag that may be anything."""
    part = next((name for name in ("BI", "BW", "B", "F") if name in text), "")
    stage, _, microbatch = text.partition(part) if part else (text, "", "")
    named: dict[str, Any] = {"PP": stage, "MB": microbatch, "PASS": part}
    return {name: int(value) if value.isdigit() else value for name, value in named.items() if value}


def order(text: str) -> Directive:
    """`order("0F0 0F1,1F0 1B")`: groups apart by spaces, their filters by commas."""
    return {
        "op": "order",
        "filters": [[picked(one) for one in group.split(",")] for group in text.split()],
    }


def chain(num_stages: int) -> list[tuple[int, int]]:
    return [(stage, stage + 1) for stage in range(num_stages - 1)]


def stage_buckets(num_stages: int) -> list[Bucket]:
    return [Bucket(name=f"stage{stage}", stages=(stage,)) for stage in range(num_stages)]


def lowered(
    directives: object, num_stages: int = 2, *, edges: Sequence[tuple[int, int]] | None = None
) -> Lowered:
    """The program, written as JSON and read back, for a model of regions PP 0, 1, .."""
    return lower_program(
        parse_program(json.dumps(directives), source="s.json"),
        tags=[{"PP": stage} for stage in range(num_stages)],
        stage_edges=chain(num_stages) if edges is None else edges,
        buckets=stage_buckets(num_stages),
    )


def programs(result: Lowered) -> list[str]:
    """Each rank's computes as text."""
    return [" ".join(map(repr, program)) for program in result.dag.programs]
