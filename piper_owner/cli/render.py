"""The final tables and the verdict: who owns what, what each run gave, and what that proves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rich import box
from rich.console import Console
from rich.table import Table

from piper_owner.cli.units import format_bytes, format_difference, format_seconds
from piper_owner.executor.config import RunKind
from piper_owner.executor.results import Differences, RunResult, TrainResult, compare
from piper_owner.ownership import TiePlan

__all__ = ["describe_tie", "figures", "heads", "loss_tolerance", "print_result", "verdict"]

_TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-2}
_TOLERANCE_STEPS = 5
# Adaptive optimizers turn rounding of a tiny gradient into a whole step, so only float64 has one.
_WEIGHT_TOLERANCE = {"float64": 1e-10}
_ABOUT = {
    RunKind.OWNER: "one copy",
    RunKind.REFERENCE: "one process",
    RunKind.NAIVE: "no sync",
    RunKind.ALLREDUCE: "two copies",
}


def print_result(result: TrainResult, console: Console) -> None:
    """Print everything; readable at 80 columns."""
    for tie in result.ownership.ties:
        console.print(describe_tie(tie), highlight=False)
    console.print()
    console.print(_table(result))
    console.print()
    for line in verdict(result):
        console.print(line, highlight=False)


def loss_tolerance(result: TrainResult) -> float:
    """How far two right runs' losses may differ by the order of float additions alone.

    Rounding adds up: the tolerance of 5 steps grows in proportion to the steps.
    """
    return _TOLERANCE[result.config.dtype] * max(1.0, result.config.steps / _TOLERANCE_STEPS)


def verdict(result: TrainResult) -> list[str]:
    """What the figures prove, in words; one line for each run that was compared."""
    lines = []
    ranks = sorted({rank for tie in result.ownership.ties for rank in tie.replicas})
    if not result.ownership.ties:
        lines.append("The model has no tied parameter: there is nothing to keep in step.")
    elif not ranks:
        lines.append("One device holds all of the tie: one parameter, no messages.")
    elif result.replicas_equal:
        lines.append("Replicas equal the owner's value bit for bit.")
    else:
        lines.append("FAULT: a replica does not hold the owner's value.")
    differences = compare(result.runs, result.ownership)
    if not differences.loss:
        lines.append("Add --compare reference to see how far this is from training in one process.")
    lines += [_judge(result, kind, differences) for kind in differences.loss]
    return lines


def _judge(result: TrainResult, kind: RunKind, differences: Differences) -> str:
    tolerance = loss_tolerance(result)
    loss = differences.loss[kind]
    name = kind.value
    # A difference that is not a number is no agreement either.
    if loss <= tolerance and differences.param[kind] <= _weight_tolerance(result):
        return (
            f"{name} trains like the reference{_state_ratio(result, kind)}: losses differ by "
            f"{format_difference(loss)}, within the {tolerance:.0e} that rounding explains."
        )
    why = (
        "its two copies drift apart"
        if kind is RunKind.NAIVE
        else "more than rounding explains; --dtype float64 shows whether it is an error"
    )
    return (
        f"{name} does NOT train like the reference: losses differ by {format_difference(loss)}, weights by "
        f"{format_difference(differences.param[kind])}; {why}."
    )


def _weight_tolerance(result: TrainResult) -> float:
    base = _WEIGHT_TOLERANCE.get(result.config.dtype, math.inf)
    return base * max(1.0, result.config.steps / _TOLERANCE_STEPS)


def _state_ratio(result: TrainResult, kind: RunKind) -> str:
    """How much more optimizer state of the tie `kind` keeps than the owner run, if it does."""
    mine, owners = (
        sum(tied.optimizer for tied in result.runs[each].tied_bytes.values())
        for each in (kind, RunKind.OWNER)
    )
    return f", with {mine / owners:.1f} times the tied optimizer state" if mine > owners > 0 else ""


def describe_tie(tie: TiePlan) -> str:
    """A tie and its holders, a line each."""
    shape = " x ".join(map(str, tie.shape))
    lines = [f"tie {' = '.join(tie.tie.names)}: one parameter, {shape} {tie.dtype}"]
    for holder in tie.holders:
        stages = ", ".join(map(str, holder.stages))
        plural = "stages" if len(holder.stages) > 1 else "stage"
        layout = holder.layout.value
        role = "owns it" if holder.rank == tie.owner else "holds a replica"
        lines.append(
            f"  rank {holder.rank} {role} ({plural} {stages}, {holder.use.value} use, {layout} layout)"
        )
    return "\n".join(lines)


def _table(result: TrainResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("run", no_wrap=True)
    for kind in result.runs:
        table.add_column(f"{kind.value}\n[dim]{_ABOUT[kind]}[/dim]", justify="right", no_wrap=True)
    for place, rows in enumerate(figures(result)):
        if place:
            table.add_section()
        for row in rows:
            table.add_row(*row)
    return table


def heads(result: TrainResult) -> list[str]:
    """The runs and what they are, as the heads of the table of figures."""
    return [f"{kind.value} ({_ABOUT[kind]})" for kind in result.runs]


def figures(result: TrainResult) -> list[list[tuple[str, ...]]]:
    """The figures, in sections: of each a label, and how it reads for every run."""
    runs = list(result.runs.values())
    differences = compare(result.runs, result.ownership)
    sections: list[list[tuple[str, ...]]] = [[]]

    def add(label: str, figure: Callable[[RunResult], str]) -> None:
        sections[-1].append((label, *(figure(run) for run in runs)))

    if result.config.steps > 1:
        add("loss at step 1", lambda run: f"{run.losses[0]:.5f}")
    add(f"loss at step {result.config.steps}", lambda run: f"{run.losses[-1]:.5f}")
    if differences.loss:
        add("against the reference", lambda run: "")
        add("  largest loss diff", lambda run: _or_dash(differences.loss, run.kind))
        add("  largest weight diff", lambda run: _or_dash(differences.param, run.kind))
    ranks = _tied_ranks(result)
    sections.append([])
    add("weights of tie", lambda run: _sum([tied.weights for tied in run.tied_bytes.values()]))
    for rank in ranks:
        add(f"  held by rank {rank}", partial(_weights_on, rank))
    sections.append([])
    add("optimizer state of tie", lambda run: _sum([tied.optimizer for tied in run.tied_bytes.values()]))
    for rank in ranks:
        add(f"  on rank {rank}", partial(_optimizer_on, rank))
    sections.append([])
    add(
        "tied bytes per step",
        lambda run: _sum([sent.total for sent in run.bytes_sent_per_step.values()]),
    )
    for rank in ranks if len(ranks) > 1 else ():
        add(f"  sent by rank {rank}", partial(_sent_from, rank))
    sections.append([])
    add("time per step", lambda run: format_seconds(run.seconds_per_step))
    add("tokens per second", lambda run: f"{run.tokens_per_second:,.0f}")
    return sections


def _tied_ranks(result: TrainResult) -> list[int]:
    """Ranks that hold a tie, or that some run made keep or send something for one."""
    ranks = {rank for tie in result.ownership.ties for rank in tie.ranks}
    for run in result.runs.values():
        ranks |= {rank for rank, tied in run.tied_bytes.items() if tied.optimizer}
        ranks |= {rank for rank, sent in run.bytes_sent_per_step.items() if sent.total}
    return sorted(ranks)


def _weights_on(rank: int, run: RunResult) -> str:
    return format_bytes(run.tied_bytes[rank].weights)


def _optimizer_on(rank: int, run: RunResult) -> str:
    return format_bytes(run.tied_bytes[rank].optimizer)


def _sent_from(rank: int, run: RunResult) -> str:
    return format_bytes(run.bytes_sent_per_step[rank].total)


def _sum(values: Sequence[int]) -> str:
    return format_bytes(sum(values))


def _or_dash(values: Mapping[RunKind, float], kind: RunKind) -> str:
    return format_difference(values[kind]) if kind in values else "-"
