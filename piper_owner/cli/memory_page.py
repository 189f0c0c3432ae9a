"""The page that `piper-owner memory --report` writes."""

from __future__ import annotations

from piper_owner.cli.memory_render import kinds_of, rank_rows, verdict
from piper_owner.cli.report import memory_section
from piper_owner.drawing.charts import Bar, BarGroup
from piper_owner.drawing.page import Section, page, table
from piper_owner.executor.memory_runs import MemoryResult, MethodMemory
from piper_owner.memory import KINDS

__all__ = ["memory_page"]


def memory_page(result: MemoryResult) -> str:
    """The whole page: what is kept by kind, the peak, and every figure."""
    config = result.config
    lead = [
        f"{config.model}, {config.stages} stages on {config.devices} ranks, schedule {config.schedule}, "
        f"{config.microbatches} microbatches, {config.steps} steps with {config.optimizer} in "
        f"{config.dtype}, under {result.where}; text: {result.text}",
        *verdict(result),
    ]
    sections = [
        memory_section(
            [_kept(run) for run in result.runs.values()],
            title="What each rank keeps",
            note="Of each kind the most at one time, in the steps after the first, measured.",
        ),
        memory_section(
            [_peaks(run) for run in result.runs.values()],
            title="Peak of all tensors in a step",
            note="The most bytes at one time: what is kept, activations, temporaries, messages.",
        ),
    ]
    for method, run in result.runs.items():
        kinds = kinds_of(run)
        rows = [
            (f"rank {number}: {cells[0]}", *cells[1:])
            for number, rank in enumerate(run.ranks)
            for cells in rank_rows(rank, kinds)
        ]
        body = table(["", *kinds], rows, caption=f"{method.value}: predicted and measured")
        sections.append(Section(title=method.value, body=body, is_wide=True))
    return page(f"piper-owner memory: {', '.join(each.value for each in result.runs)}", lead, sections)


def _kept(run: MethodMemory) -> BarGroup:
    bars = [
        Bar(label=f"rank {number}", parts={kind: float(getattr(rank.later.use, kind)) for kind in KINDS})
        for number, rank in enumerate(run.ranks)
    ]
    return BarGroup(name=run.method.value, bars=tuple(bars))


def _peaks(run: MethodMemory) -> BarGroup:
    bars = [
        Bar(label=f"rank {number}", parts={"peak": float(rank.later.peak)})
        for number, rank in enumerate(run.ranks)
    ]
    return BarGroup(name=run.method.value, bars=tuple(bars))
