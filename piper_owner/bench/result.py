"""What a benchmark measured, as JSON and as the cells of a table."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from piper_owner.bench.config import StepWay, Way
from piper_owner.bench.predict import Inputs, inputs_from_json

__all__ = ["EXPOSED_HEADER", "STEPS_HEADER", "WAYS_HEADER", "BenchResult", "Exposed", "WayFigures"]

WAYS_HEADER: Final = (
    *("way", "sync ms", "step ms", "total ms", "MB", "limit ms", "sync/limit", "total/all-reduce"),
)
STEPS_HEADER: Final = ("training step", "seconds", "against untied")
EXPOSED_HEADER: Final = ("exposed sync", "predicted ms", "measured ms", "rounds ms", "predicted/measured")

_EQUAL: Final = 1e-3
"""Of an untied step: predictions that differ by less are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WayFigures:
    """One way; each figure is a median over the rounds by itself.

    sync_seconds: communication that is waited for: the total without `step_seconds`.
    step_seconds: adding gradients up and stepping the table, until every rank that steps is done.
    total_seconds: from a common start until both ranks are done, without the model's own computing.
    bytes: sent and received by one of the two hosts.
    limit_seconds: of an ideal link: over the phases that follow one another, the sum of the larger
        direction's bytes, divided by the rate.
    """

    sync_seconds: float
    step_seconds: float
    total_seconds: float
    bytes: int
    limit_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """What a training step takes longer than the untied one; less than nothing where it is shorter.

    measured_seconds: the median over the rounds, of which lowest and highest are the ends.
    """

    predicted_seconds: float
    measured_seconds: float
    lowest_seconds: float
    highest_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """All figures of one run."""

    rate_bits_per_s: float
    table: tuple[int, int]
    tokens: int
    unique_rows: int
    ways: Mapping[Way, WayFigures]
    steps: Mapping[StepWay, float] = field(default_factory=dict)
    """Seconds of a whole training step; empty where they were left out, as what follows."""
    exposed: Mapping[StepWay, Exposed] = field(default_factory=dict)
    inputs: Inputs | None = None
    """What the predictions among `exposed` were made from."""
    auto: StepWay | None = None
    """What `layout="auto"` and `owner="auto"` take."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict: the fields of this class by name, with ways by theirs."""
        return {
            "rate_bits_per_s": self.rate_bits_per_s,
            "table": list(self.table),
            "tokens": self.tokens,
            "unique_rows": self.unique_rows,
            "ways": {way.value: asdict(figures) for way, figures in self.ways.items()},
            "steps": {way.value: seconds for way, seconds in self.steps.items()},
            "exposed": {way.value: asdict(figures) for way, figures in self.exposed.items()},
            "inputs": None if self.inputs is None else asdict(self.inputs),
            "auto": None if self.auto is None else self.auto.value,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> BenchResult:
        """The result that `to_json` gave."""
        rows, columns = value["table"]
        return cls(
            rate_bits_per_s=value["rate_bits_per_s"],
            table=(rows, columns),
            tokens=value["tokens"],
            unique_rows=value["unique_rows"],
            ways={Way(name): WayFigures(**figures) for name, figures in value["ways"].items()},
            steps={StepWay(name): seconds for name, seconds in value["steps"].items()},
            exposed={StepWay(name): Exposed(**figures) for name, figures in value["exposed"].items()},
            inputs=None if value["inputs"] is None else inputs_from_json(value["inputs"]),
            auto=None if value["auto"] is None else StepWay(value["auto"]),
        )

    def title(self) -> str:
        """What was measured."""
        rows, columns = self.table
        return (
            f"{rows:,} x {columns} float32 ({rows * columns * 4 / 1e6:.1f} MB), fused AdamW, "
            f"{self.rate_bits_per_s / 1e9:.3g} Gbit/s; {self.tokens:,} tokens look up {self.unique_rows:,} "
            "rows"
        )

    def way_cells(self) -> list[tuple[str, ...]]:
        """A row for each way, below WAYS_HEADER."""
        base = self.ways[Way.ALLREDUCE].total_seconds
        return [
            (
                way.value,
                _milliseconds(figures.sync_seconds),
                _milliseconds(figures.step_seconds),
                _milliseconds(figures.total_seconds),
                f"{figures.bytes / 1e6:.2f}",
                _milliseconds(figures.limit_seconds),
                f"{figures.sync_seconds / figures.limit_seconds:.2f}x",
                f"{figures.total_seconds / base:.3f}x",
            )
            for way, figures in self.ways.items()
        ]

    def step_cells(self) -> list[tuple[str, ...]]:
        """A row for each way to train, below STEPS_HEADER."""
        return [
            (way.value, f"{seconds:.3f} s", f"{seconds / self.steps[StepWay.UNTIED]:.3f}x")
            for way, seconds in self.steps.items()
        ]

    def exposed_cells(self) -> list[tuple[str, ...]]:
        """A row for each way that is predicted, below EXPOSED_HEADER."""
        return [
            (
                way.value,
                _milliseconds(each.predicted_seconds),
                _milliseconds(each.measured_seconds),
                f"{_milliseconds(each.lowest_seconds)} to {_milliseconds(each.highest_seconds)}",
                f"{each.predicted_seconds / each.measured_seconds:.2f}x" if each.measured_seconds else "-",
            )
            for way, each in self.exposed.items()
        ]

    def _order_note(self) -> str:
        predicted = {way: each.predicted_seconds for way, each in self.exposed.items()}
        measured = {way: each.measured_seconds for way, each in self.exposed.items()}
        auto = "" if self.auto is None else f"; auto takes {self.auto.value}"
        # As among the planner's owners, what differs by less than that is equal.
        equal = _EQUAL * self.steps[StepWay.UNTIED]
        first = f"least exposed first, predicted: {_order(predicted, equal)}"
        return f"{first}; measured: {_order(measured, 0.0)}{auto}"

    def notes(self) -> list[str]:
        """What the figures say about rows and chunks, in words."""
        reduced, dense, rows = (self.ways[way] for way in (Way.ALLREDUCE, Way.DENSE, Way.ROWS))
        faster = reduced.sync_seconds / rows.sync_seconds
        possible = reduced.limit_seconds / rows.limit_seconds
        lines = [
            f"rows: a sync takes {rows.sync_seconds / rows.limit_seconds:.2f}x its limit; an all-reduce "
            f"takes {faster:.1f}x as long ({possible:.1f}x by the limits)",
            f"dense: sync and step take {dense.total_seconds / reduced.total_seconds:.3f}x the time of "
            "all-reduce and both steps",
        ]
        if self.steps:
            untied = self.steps[StepWay.UNTIED]
            lines.append(
                f"1F1B: a whole step takes {self.steps[StepWay.ROWS] / untied:.3f}x the untied one with "
                f"rows, {self.steps[StepWay.ALLREDUCE] / untied:.3f}x with all-reduce"
            )
        if self.exposed:
            lines.append(self._order_note())
        return lines


def _order(seconds: Mapping[StepWay, float], equal: float) -> str:
    """The ways by their seconds, with "=" between those that differ by less than `equal`."""
    ways = sorted(seconds, key=lambda way: seconds[way])
    text = ways[0].value
    for before, way in itertools.pairwise(ways):
        text += f"{' = ' if seconds[way] - seconds[before] < equal else ', '}{way.value}"
    return text


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
