"""A comparison as JSON and as lines of text. Pure."""

from __future__ import annotations

import bisect
from dataclasses import asdict
from enum import Enum
from typing import Any, Final, assert_never

from piper_owner.dag.nodes import (
    Across,
    Action,
    BucketStep,
    Collective,
    Compute,
    ComputeKind,
    Sync,
    SyncKind,
    Transfer,
)
from piper_owner.planning.compare import Comparison, MethodPlan
from piper_owner.planning.config import PlanConfig
from piper_owner.planning.seconds import Timing
from piper_owner.planning.shapes import count

__all__ = ["LEGEND", "busy_shares", "timeline_rows", "to_json"]

_BUSY: Final = frozenset("FBS")
LEGEND: Final = "F forward  B backward  S optimizer step  = waits for the tied sync  . idle"


def to_json(comparison: Comparison, *, rows_from: str) -> dict[str, Any]:
    """What `piper-owner plan --json` writes: plain dicts, lists, strings, numbers and null.

    rows_from: where the number of rows in use comes from.
    """
    model = comparison.model
    return {
        "model": {
            "name": model.name,
            "parameters": model.num_parameters,
            "hidden": model.hidden,
            "stages": [
                {"tensors": len(stage.shapes), "parameters": count(stage.shapes)} for stage in model.stages
            ],
        },
        "config": _config(comparison.config),
        "rows_from": rows_from,
        "placement": list(comparison.placement),
        "methods": {method.value: plan.to_dict() for method, plan in comparison.plans.items()},
        "tried": [
            {
                "method": method.value,
                "owner": rank,
                "step_seconds": plan.timing.step_seconds,
                "exposed_seconds": plan.exposed_seconds,
                "peak_bytes": plan.peak,
            }
            for (method, rank), plan in comparison.tried.items()
        ],
        "impossible": {method.value: why for method, why in comparison.impossible.items()},
        "advice": {"method": comparison.advice.value, "reason": comparison.reason},
    }


def _config(config: PlanConfig) -> dict[str, Any]:
    values = {
        name: value.value if isinstance(value, Enum) else value for name, value in asdict(config).items()
    }
    return {
        **values,
        "stage_seconds": list(config.stage_seconds),
        "backward_seconds": list(config.backward_seconds),
    }


def busy_shares(plan: MethodPlan) -> list[float]:
    """By rank, the share of a step in which it computes or steps."""
    whole = plan.timing.step_seconds * plan.timing.num_steps
    timeline = plan.timing.timeline
    shares = []
    for program, starts, ends in zip(timeline.programs, timeline.starts, timeline.ends, strict=True):
        busy = sum(
            end - start
            for action, start, end in zip(program, starts, ends, strict=True)
            if _mark(action) in _BUSY
        )
        shares.append(min(1.0, busy / whole) if whole else 0.0)
    return shares


def timeline_rows(timing: Timing, ranks: list[int], width: int) -> list[str]:
    """For each of `ranks`, what it does in a step: a mark of LEGEND for each of `width` equal parts.

    A mark is that of what runs in the middle of its part.
    """
    begin, end = timing.window
    times = [begin + (end - begin) * (part + 0.5) / width for part in range(width)]
    rows = []
    for rank in ranks:
        starts, ends = timing.timeline.starts[rank], timing.timeline.ends[rank]
        program = timing.timeline.programs[rank]
        marks = []
        for time in times:
            position = bisect.bisect_right(starts, time) - 1
            while position > 0 and ends[position] <= time and starts[position] == ends[position]:
                position -= 1
            runs = position >= 0 and starts[position] <= time < ends[position]
            marks.append(_mark(program[position]) if runs else ".")
        rows.append("".join(marks))
    return rows


def _mark(action: Action) -> str:
    match action:
        case Compute(kind=kind):
            return "F" if kind is ComputeKind.FORWARD else "B"
        case BucketStep():
            return "S"
        case Sync(kind=sync):
            return "S" if sync is SyncKind.OWNER_STEP else "="
        case Collective() | Across():
            return "="
        case Transfer():
            return "."
        case _:
            assert_never(action)
