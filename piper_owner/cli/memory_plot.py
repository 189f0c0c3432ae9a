"""Draws measured memory with matplotlib: a panel a run, a stacked bar a rank. It is optional."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any, Final

from piper_owner.errors import ConfigError
from piper_owner.executor.memory_runs import MemoryResult
from piper_owner.memory import KINDS

__all__ = ["check_plot", "draw_plot"]

_FORMATS: Final = (".png", ".svg", ".pdf")
_COLOURS: Final = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb")
_UNITS: Final = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def check_plot(path: Path) -> None:
    """Raise ConfigError if a plot cannot be drawn into `path`: another format, or no matplotlib."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot {path}: give it one of the endings {', '.join(_FORMATS)}")
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            f"--plot {path}: matplotlib is not installed; pip install 'piper-owner[plot]', or use --report, "
            "which has the bars too and needs nothing"
        ) from error


def draw_plot(result: MemoryResult, path: Path) -> None:
    """Draw into `path`, whole or not at all. Raises OSError."""
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(1.6 + 2.2 * len(result.runs), 4.2), layout="constrained")
    panels = figure.subplots(1, len(result.runs), sharey=True, squeeze=False)[0]
    unit, name = _unit(result)
    every = [rank.later.use for run in result.runs.values() for rank in run.ranks]
    shown = [kind for kind in KINDS if any(getattr(use, kind) for use in every)]
    for panel, (method, run) in zip(panels, result.runs.items(), strict=True):
        ranks = [str(rank) for rank in range(len(run.ranks))]
        bottoms = [0.0] * len(ranks)
        for kind, colour in zip(KINDS, _COLOURS, strict=True):
            sizes = [getattr(rank.later.use, kind) / unit for rank in run.ranks]
            if kind not in shown:
                continue
            panel.bar(ranks, sizes, bottom=bottoms, color=colour, label=kind, width=0.7)
            bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
        foreseen = [rank.predicted.total / unit for rank in run.ranks]
        panel.plot(ranks, foreseen, linestyle="", marker="_", markersize=22, color="black", label="predicted")
        panel.set_title(method.value)
        panel.set_xlabel("rank")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(0, 1.06 * max(use.total for use in every) / unit)
    panels[0].set_ylabel(f"memory, {name}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=150)
    path.write_bytes(drawn.getvalue())


def _unit(result: MemoryResult) -> tuple[float, str]:
    most = max(rank.later.use.total for run in result.runs.values() for rank in run.ranks)
    return next((unit, name) for unit, name in _UNITS if most >= unit or unit == 1.0)
