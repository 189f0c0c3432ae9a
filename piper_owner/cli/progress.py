"""What is shown while runs train: a live bar on a terminal, else a plain line now and then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from piper_owner.cli.units import format_bytes
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.results import Restart
from piper_owner.runtime.progress import OnRestart, OnStep, OnStop, StepProgress

__all__ = ["Shown", "show_progress"]

_LINES_PER_RUN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What to call after every step, at every restart, and when the run is to be saved and to end."""

    on_step: OnStep
    on_restart: OnRestart
    on_stop: OnStop


@contextmanager
def show_progress(console: Console, config: TrainConfig, runs: Sequence[RunKind]) -> Iterator[Shown]:
    """Announce the start, and give what to call from then on."""
    start = f"training on {config.num_ranks} {'worker' if config.num_ranks == 1 else 'workers'}"
    if console.is_terminal:
        with _live(console, config, runs) as shown:
            yield shown
        return
    console.print(
        f"{start}: {', '.join(kind.value for kind in runs)}; {config.steps} steps each", soft_wrap=True
    )
    every = max(1, config.steps // _LINES_PER_RUN)

    def print_line(done: StepProgress) -> None:
        if done.step % every == 0 or done.step == config.steps:
            line = f"{done.run.value:<9}  step {done.step:>4}/{config.steps}  {_figures(done)}"
            console.print(line, soft_wrap=True)

    def print_restart(restart: Restart) -> None:
        console.print(_again(restart), soft_wrap=True, markup=False, highlight=False)

    yield Shown(on_step=print_line, on_restart=print_restart, on_stop=partial(_say_stop, console))


@contextmanager
def _live(console: Console, config: TrainConfig, runs: Sequence[RunKind]) -> Iterator[Shown]:
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    # Standard output is left alone: what Ray writes there would break the bar.
    with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as progress:
        tasks = {
            kind: progress.add_task(kind.value, total=config.steps, start=False, figures="") for kind in runs
        }
        progress.update(tasks[runs[0]], figures="starting Ray")

        def update(done: StepProgress) -> None:
            progress.update(tasks[done.run], completed=done.step, figures=_figures(done))

        def begin_again(restart: Restart) -> None:
            progress.update(tasks[restart.run], completed=restart.from_step, figures="restarting")
            progress.console.print(_again(restart), soft_wrap=True, markup=False, highlight=False)

        yield Shown(on_step=update, on_restart=begin_again, on_stop=partial(_say_stop, progress.console))


def _say_stop(console: Console, step: int) -> None:
    console.print(
        f"stopping after step {step}, to save it; the same signal once more ends at once",
        soft_wrap=True,
        highlight=False,
    )


def _again(restart: Restart) -> str:
    place = f"after step {restart.from_step}" if restart.from_step else "from its first step"
    return f"{restart.why}; the {restart.run.value} run goes on {place}"


def _figures(done: StepProgress) -> str:
    return (
        f"loss {done.loss:.4f}  {done.tokens_per_second:,.0f} tok/s  tie {format_bytes(done.tied_bytes)}/step"
    )
