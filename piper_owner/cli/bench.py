"""`piper-owner bench`: time the ways to keep a tied table in step, between two processes here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from piper_owner.bench.config import BenchConfig, config_of
from piper_owner.bench.launch import LOCAL, run_pair
from piper_owner.bench.result import EXPOSED_HEADER, STEPS_HEADER, WAYS_HEADER, BenchResult
from piper_owner.cli.termination import orderly_termination
from piper_owner.cli.train import write_json
from piper_owner.errors import RunError
from piper_owner.paths import check_output

__all__ = ["print_figures", "read", "run"]


def read(arguments: argparse.Namespace) -> BenchConfig:
    """What the parsed arguments ask for. Raises ConfigError for what cannot work."""
    check_output("--json", arguments.json)
    return config_of(arguments)


def run(config: BenchConfig, arguments: argparse.Namespace) -> int:
    """Measure as asked, print the tables to stdout (a spinner to stderr), and return the exit status.

    Raises InputError before anything starts, RunError when a rank fails.
    """
    with orderly_termination(), Console(file=sys.stderr).status("measuring (Ctrl+C ends it) ..."):
        result = run_pair(config, LOCAL, text=arguments.text)
    print_figures(result, Console(file=sys.stdout, highlight=False))
    if arguments.json is not None:
        try:
            write_json(arguments.json, result.to_json())
        except OSError as error:
            reason = error.strerror or error
            raise RunError(f"--json {arguments.json}: cannot write it: {reason}") from error
    return 0


def print_figures(result: BenchResult, console: Console) -> None:
    """Print everything; readable at 80 columns."""
    console.print(result.title())
    console.print()
    console.print(_table(WAYS_HEADER, result.way_cells()))
    console.print()
    if result.steps:
        console.print(_table(STEPS_HEADER, result.step_cells()))
        console.print()
        console.print(_table(EXPOSED_HEADER, result.exposed_cells()))
        console.print()
    for line in result.notes():
        console.print(line)


def _table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    options: dict[str, Any] = {"no_wrap": True}
    # Narrow, so that eight columns fit a terminal of 80.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(header[0], **options)
    for name in header[1:]:
        table.add_column(name.replace("/", "/\n"), justify="right", **options)
    for row in cells:
        table.add_row(*row)
    return table
