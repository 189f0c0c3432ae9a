"""`piper-owner memory`: what each rank keeps, measured on Ray, beside the prediction."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from piper_owner.cli.memory_options import MemoryOptions
from piper_owner.cli.memory_page import memory_page
from piper_owner.cli.memory_plot import check_plot, draw_plot
from piper_owner.cli.memory_render import print_memory
from piper_owner.cli.models import model_source
from piper_owner.cli.output import cache_folder, write_json, write_text
from piper_owner.cli.termination import orderly_termination
from piper_owner.data.text import read_text
from piper_owner.data.vocabulary import encode
from piper_owner.errors import ConfigError, RunError
from piper_owner.executor.config import TrainConfig
from piper_owner.executor.memory_runs import MemoryResult, plan_method
from piper_owner.executor.plan import resolve_run
from piper_owner.executor.source import ModelSource
from piper_owner.executor.stream import token_stream
from piper_owner.planning.config import Method
from piper_owner.runtime import environment
from piper_owner.runtime.address import check_address

__all__ = ["check_outputs", "possible", "read_tokens", "run", "show_steps", "write_outputs"]


def run(options: MemoryOptions) -> int:
    """Measure as asked, print the tables to stdout (progress to stderr), and return the exit status.

    Raises InputError before anything starts, RunError when a rank fails.
    """
    notes = Console(file=sys.stderr, highlight=False)
    if options.address is not None:
        check_address(options.address)
    check_outputs(options)
    source = model_source(options.config.model)
    config = resolve_run(options.config, source)
    methods = possible(config, options.methods, source, notes)
    text, tokens = read_tokens(options, config)
    environment.prepare(options.address)
    # Only now, because Ray reads the environment when it is imported.
    from piper_owner.runtime.measuring import measure_runs

    with (
        orderly_termination(),
        show_steps(notes, config, methods) as on_step,
        redirect_stdout(io.StringIO()),  # Ray prints there from threads of its own
    ):
        result = measure_runs(
            config,
            tokens,
            methods,
            text=text,
            source=source,
            address=options.address,
            on_step=on_step,
        )
    print_memory(result, Console(file=sys.stdout, highlight=False))
    write_outputs(options, result)
    return 0


def possible(
    config: TrainConfig, asked: Sequence[Method], source: ModelSource, notes: Console
) -> tuple[Method, ...]:
    """The runs to measure: those asked for, or all that are possible, with a note about the others.

    Raises ConfigError for one that was asked for and is not possible.
    """
    found = []
    for method in asked or tuple(Method):
        try:
            plan_method(config, method, source)
        except ConfigError as error:
            if asked:
                raise
            notes.print(f"without {method.value}: {error}", soft_wrap=True)
        else:
            found.append(method)
    if not found:
        raise ConfigError("none of the runs is possible; --runs with one of them says why")
    return tuple(found)


def read_tokens(options: MemoryOptions, config: TrainConfig) -> tuple[str, NDArray[np.int32]]:
    """Where the text comes from, and its tokens; checked to be enough for one sequence."""
    text = read_text(options.text)
    tokens = encode(text, config.vocab, cache_dir=cache_folder())
    token_stream(config, tokens)
    return text.source, tokens


@contextmanager
def show_steps(
    console: Console, config: TrainConfig, methods: Sequence[Method]
) -> Iterator[Callable[[Method, int], None]]:
    """A bar for each run on a terminal, else a line; gives what to call after each step."""
    if not console.is_terminal:
        names = ", ".join(method.value for method in methods)
        console.print(
            f"measuring on {config.num_ranks} workers: {names}; {config.steps} steps each", soft_wrap=True
        )
        yield lambda method, step: None
        return
    columns = (TextColumn("{task.description:<10}"), BarColumn(bar_width=24), MofNCompleteColumn())
    # Standard output is left alone: what Ray writes there would break the bar.
    with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as progress:
        tasks = {method: progress.add_task(method.value, total=config.steps) for method in methods}
        yield lambda method, step: progress.update(tasks[method], completed=step)


def check_outputs(options: MemoryOptions) -> None:
    """Raise ConfigError, before anything starts, for an output that cannot be made."""
    if options.plot is not None:
        check_plot(options.plot)


def write_outputs(options: MemoryOptions, result: MemoryResult) -> None:
    """Write the files that were asked for. Raises RunError for one that cannot be written."""
    if options.json is not None:
        _write("--json", options.json, lambda path: write_json(path, result.to_json()))
    if options.plot is not None:
        _write("--plot", options.plot, lambda path: draw_plot(result, path))
    if options.report is not None:
        _write("--report", options.report, lambda path: write_text(path, memory_page(result)))


def _write(option: str, path: Path, write: Callable[[Path], Any]) -> None:
    try:
        write(path)
    except OSError as error:
        raise RunError(f"{option} {path}: cannot write it: {error.strerror or error}") from error
