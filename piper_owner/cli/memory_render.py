"""Measured memory as tables and words for people."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from piper_owner.cli.units import format_bytes
from piper_owner.executor.memory_runs import EXACT, MemoryResult, MethodMemory, RankMeasured

__all__ = ["kinds_of", "print_memory", "rank_rows", "verdict"]

_SHORT = {"gradients": "grads", "optimizer": "optim."}
_ABOUT = {
    "naive": "two copies, no sync",
    "all-reduce": "two copies, gradients added on both",
    "dense": "one owner, a working copy",
    "rows": "one owner, the rows of a step",
}


def print_memory(result: MemoryResult, console: Console) -> None:
    """Print everything; readable at 80 columns."""
    for method, run in result.runs.items():
        owners = sorted({tie.owner for tie in run.ownership.ties})
        about = _ABOUT[method.value]
        if about.startswith("one owner") and owners:
            about = about.replace("one owner", f"owned by rank {', '.join(map(str, owners))}")
        console.print(f"{method.value}: {about}")
        console.print(_table(run))
        for line in _processes(run):
            console.print(line)
        console.print()
    for line in verdict(result):
        console.print(line)


def kinds_of(run: MethodMemory) -> list[str]:
    """The kinds of which some rank has, or was to have, anything."""
    return [
        kind
        for kind in run.ranks[0].difference
        if any(_figures(rank)[part].get(kind) for rank in run.ranks for part in ("predicted", "measured"))
    ]


def _figures(rank: RankMeasured) -> dict[str, Mapping[str, int | None]]:
    whole = rank.to_dict()
    return {part: whole[part] for part in ("predicted", "measured", "difference")}


def rank_rows(rank: RankMeasured, kinds: list[str]) -> list[tuple[str, ...]]:
    """Three rows of cells: what was predicted, what was measured, the difference."""
    rows = []
    for part, figures in _figures(rank).items():
        show = _signed if part == "difference" else _plain
        rows.append((part, *(show(figures.get(kind)) for kind in kinds)))
    return rows


def _plain(size: int | None) -> str:
    return "" if size is None else format_bytes(size) if size else "-"


def _signed(size: int | None) -> str:
    if not size:
        return "" if size is None else "0"
    return f"{'+' if size > 0 else '-'}{format_bytes(abs(size))}"


def _table(run: MethodMemory) -> Table:
    kinds = kinds_of(run)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for kind in kinds:
        table.add_column(_SHORT.get(kind, kind), justify="right", no_wrap=True)
    for number, rank in enumerate(run.ranks):
        for place, cells in enumerate(rank_rows(rank, kinds)):
            table.add_row("" if place else str(number), *cells)
        table.add_section()
    return table


def _processes(run: MethodMemory) -> list[str]:
    """What the processes have, where that is known: shown, and compared with nothing."""
    found = [rank.later.process.to_dict() for rank in run.ranks]
    lines = []
    for name, words in (
        ("resident", "resident set"),
        ("allocated", "CUDA allocated"),
        ("reserved", "CUDA reserved"),
        ("peak", "CUDA peak"),
    ):
        sizes = [each[name] for each in found]
        if any(size is not None for size in sizes):
            lines.append(f"{words} by rank: {', '.join(_plain(size) for size in sizes)}")
    return lines


def verdict(result: MemoryResult) -> list[str]:
    """What the figures say, in words."""
    named = ", ".join(EXACT[:-1]) + f" and {EXACT[-1]} state"
    if result.is_exact:
        lines = [f"{named}: as predicted, to the byte, on every rank of every run."]
    else:
        wrong = [
            f"{method.value} rank {number}"
            for method, run in result.runs.items()
            for number, rank in enumerate(run.ranks)
            if not rank.is_exact
        ]
        lines = [f"FAULT: {named} differ from the prediction: {'; '.join(wrong)}."]
    lines.append(
        f"peak of all tensors in a step: the prediction is within {max(result.peak_error, 0.001):.1%} of "
        "every rank's. Staging is what is held between actions; the prediction is about the most."
    )
    for method, run in result.runs.items():
        state = sum(rank.later.use.masters + rank.later.use.optimizer for rank in run.ranks)
        fullest = max(rank.later.peak for rank in run.ranks)
        lines.append(
            f"{method.value:<10}  optimizer state of all ranks {format_bytes(state)}, "
            f"peak of the fullest {format_bytes(fullest)}"
        )
    return lines
