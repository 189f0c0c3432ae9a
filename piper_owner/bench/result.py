"""What a benchmark measured, as JSON and as the cells of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from piper_owner.bench.config import StepWay, Way

__all__ = ["STEPS_HEADER", "WAYS_HEADER", "BenchResult", "WayFigures"]

WAYS_HEADER: Final = (
    *("way", "sync ms", "step ms", "total ms", "MB", "limit ms", "sync/limit", "total/all-reduce"),
)
STEPS_HEADER: Final = ("training step", "seconds", "against untied")


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
class BenchResult:
    """All figures of one run."""

    rate_bits_per_s: float
    table: tuple[int, int]
    tokens: int
    unique_rows: int
    ways: Mapping[Way, WayFigures]
    steps: Mapping[StepWay, float] = field(default_factory=dict)
    """Seconds of a whole training step; empty where they were left out."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict: the fields of this class by name, with ways by theirs."""
        return {
            "rate_bits_per_s": self.rate_bits_per_s,
            "table": list(self.table),
            "tokens": self.tokens,
            "unique_rows": self.unique_rows,
            "ways": {way.value: asdict(figures) for way, figures in self.ways.items()},
            "steps": {way.value: seconds for way, seconds in self.steps.items()},
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
        return lines


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
