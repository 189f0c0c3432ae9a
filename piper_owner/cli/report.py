"""The page that `piper-owner train --report` writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from piper_owner.cli.render import describe_tie, figures, heads, verdict
from piper_owner.cli.units import format_bytes
from piper_owner.dag.nodes import Sync, SyncKind
from piper_owner.drawing.charts import Bar, BarGroup, Curve, curves, stacked_bars
from piper_owner.drawing.page import Section, page, paragraphs, table, wide
from piper_owner.drawing.timeline import Arrow, Look, draw
from piper_owner.executor.recording import trace_of_run
from piper_owner.executor.results import RunResult, TrainResult
from piper_owner.simulate import Timeline, counterpart
from piper_owner.tracing.events import Trace, timeline_of

__all__ = ["memory_section", "timeline_section", "train_page"]

_TIMELINE_WIDTH: Final = 1000.0
_MOST_LOSSES: Final = 200


def train_page(result: TrainResult) -> str:
    """The whole page: loss curves, memory, the timeline of the last step recorded, every figure."""
    config = result.config
    lead = [
        f"{config.model}, {config.stages} stages on {config.num_ranks} "
        f"{'ranks' if config.num_ranks > 1 else 'rank'}, schedule "
        f"{config.schedule if config.program is None else config.program.source}, {config.microbatches} "
        f"microbatches, {config.steps} steps with {config.optimizer} in {config.dtype}; text: {result.text}",
        *(line for tie in result.ownership.ties for line in describe_tie(tie).splitlines()),
        *verdict(result),
    ]
    lines = [Curve(name=kind.value, values=run.losses) for kind, run in result.runs.items()]
    chart = curves(lines, title="Loss by step", across="step", up="loss")
    sections = [
        Section(title="Loss", body=chart),
        memory_section(
            [_of_ties(run) for run in result.runs.values()],
            title="Memory of the ties",
            note="Bytes that tied parameters take on each rank, by what they are for, measured.",
        ),
        memory_section(
            [_of_optimizer(run) for run in result.runs.values()],
            title="Optimizer state",
            note="Bytes of optimizer state on each rank, masters included, measured.",
        ),
    ]
    if result.records:
        trace = trace_of_run(result.records, title="the owner run")
        sections.append(timeline_section(trace, num_microbatches=config.microbatches))
    rows = [row for section in figures(result) for row in section]
    body = table(["run", *heads(result)], rows, caption="What each run gave")
    sections.append(Section(title="Figures", body=body, is_wide=True))
    sections.append(Section(title="Losses", body=_losses(result), is_wide=True))
    return page(f"piper-owner train: {', '.join(kind.value for kind in result.runs)}", lead, sections)


def _of_ties(run: RunResult) -> BarGroup:
    bars = [
        Bar(label=f"rank {rank}", parts={kind: float(size) for kind, size in tied.to_dict().items()})
        for rank, tied in sorted(run.tied_bytes.items())
    ]
    return BarGroup(name=run.kind.value, bars=tuple(bar for bar in bars if bar.total > 0))


def _of_optimizer(run: RunResult) -> BarGroup:
    bars = [
        Bar(label=f"rank {rank}", parts={"of ties": float(tied), "of the rest": float(size - tied)})
        for rank, size in sorted(run.optimizer_state_bytes.items())
        for tied in [run.tied_bytes[rank].optimizer]
    ]
    return BarGroup(name=run.kind.value, bars=tuple(bar for bar in bars if bar.total > 0))


def memory_section(groups: Sequence[BarGroup], *, title: str, note: str) -> Section:
    """Bars of bytes: a group a run, a bar a rank, a part a kind."""
    bars = stacked_bars(groups, title=title, format_value=lambda value: format_bytes(round(value)))
    return Section(title=title, body=f"{bars}\n{paragraphs([note], is_note=True)}")


def timeline_section(trace: Trace, *, num_microbatches: int) -> Section:
    """What every rank did in the last step of `trace`, of the first pipeline, with the messages of ties."""
    step = trace.steps[-1]
    timeline = timeline_of(trace, step)
    drawing = draw(
        timeline,
        title=f"Step {step + 1} of {trace.title}, rank by rank",
        num_microbatches=num_microbatches,
        arrows=_tied_messages(timeline) if not trace.is_measured else (),
        look=Look(
            width=_TIMELINE_WIDTH, unit="ms", scale=1000.0, ink="currentColor", paper=None, has_title=False
        ),
    )
    busy = ", ".join(
        f"rank {rank} {share / timeline.makespan:.0%}" if timeline.makespan else f"rank {rank} -"
        for rank, share in enumerate(timeline.busy)
    )
    error = max(rank.clock_error_ns for rank in trace.ranks) / 1e6
    notes = [
        f"Busy with computing and stepping: {busy}. Between two blocks a rank waits for the pipeline's "
        "messages.",
        f"Clocks of the ranks agree to {error:.2g} ms.",
    ]
    body = wide(drawing, label="Timeline of one step, scrolls sideways")
    return Section(
        title=f"Timeline of step {step + 1}",
        body=f"{body}\n{paragraphs(notes, is_note=True)}",
        is_wide=True,
    )


def _tied_messages(timeline: Timeline) -> list[Arrow]:
    """The messages of ties, from where they are sent to where they are taken in."""
    taken = {
        (rank, event.action): event.end
        for rank in range(len(timeline.programs))
        for event in timeline.events(rank)
        if isinstance(event.action, Sync) and event.action.kind is not SyncKind.OWNER_STEP
    }
    arrows = []
    for rank in range(len(timeline.programs)):
        for event in timeline.events(rank):
            found = counterpart(event.action, rank) if isinstance(event.action, Sync) else None
            if found is not None and found in taken:
                arrows.append(
                    Arrow(
                        source=rank,
                        sent=event.start,
                        target=found[0],
                        received=taken[found],
                        label=repr(event.action),
                    )
                )
    return arrows


def _losses(result: TrainResult) -> str:
    steps = range(min(result.config.steps, _MOST_LOSSES))
    rows = [(str(step + 1), *(f"{run.losses[step]:.6g}" for run in result.runs.values())) for step in steps]
    left = result.config.steps - len(rows)
    caption = "Loss of the whole batch, by step" + (f"; {left} later steps left out" if left else "")
    inner = table(["step", *(kind.value for kind in result.runs)], rows, caption=caption)
    return f"<details><summary>Losses of {len(rows)} steps</summary>\n{inner}</details>"
