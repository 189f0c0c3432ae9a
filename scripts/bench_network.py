#!/usr/bin/env python3
"""Time the ways to keep two uses of one table in step over a slow link between two hosts.

The hosts are network namespaces of this machine with one rank process each, joined by a veth pair
whose ends are shaped with `tc tbf`. That needs root, `ip` and `tc`; without them the script says so
and ends with status 0. Everything that it makes, it removes again. The link leads nowhere else.

In one run, in turn, on contiguous tokens of real text:

  allreduce     two copies: all-reduce the gradient, step on both sides
  dense_serial  one owner: the whole gradient goes there, is stepped, the whole weights come back
  dense         the same in chunks, so that both directions of the link are busy at once
  rows          one owner, no copy: the rows in use are fetched, and their gradients go back

total: from a common start until both ranks are done. step: adding up and stepping on the owner (for
allreduce: until both have stepped). sync is the total without the step, so what is waited for
communication; for rows it is the fetch before the forward and the gradients behind the backward.
Bytes are those that the interface counts, both directions together. The limit is that of a perfect
link: bytes / rate, of the larger direction, added up over the phases that follow one another. The
shaper lets a burst through at once (--burst), and charges each packet its headers, which the
interface does not count.

Then whole training steps of a small GPT on two stages under 1F1B over the same link: untied (two
tables, each stepped on its own rank), and the other ways.

    scripts/bench_network.py                                GPT-2's table at 1 Gbit/s
    scripts/bench_network.py --rate 10gbit --skip-steps     a faster link, no training steps
    scripts/bench_network.py --json figures.json --plot figures.png
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn

from piper_owner.bench.config import BenchConfig, add_options, config_of
from piper_owner.bench.launch import run_pair
from piper_owner.bench.result import EXPOSED_HEADER, STEPS_HEADER, WAYS_HEADER, BenchResult
from piper_owner.bench.two_hosts import two_hosts
from piper_owner.errors import ConfigError, InputError, PiperOwnerError, ResourceError
from piper_owner.paths import check_output

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def main() -> int:
    """Run the benchmark: 0 done or skipped, 1 failed, 2 bad input, 130 interrupted."""
    options = parse_options()
    signal.signal(signal.SIGTERM, end)
    try:
        config = config_of(options, rate=bits_per_second(options.rate))
        check_output("--json", options.json)
        check_output("--plot", options.plot)
        if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib: pip install 'piper-owner[plot]'")
        with ExitStack() as stack:
            try:
                pair = stack.enter_context(two_hosts(rate=options.rate, burst=options.burst))
            except ResourceError as error:
                print(f"skipped: {error}; without two hosts there is: piper-owner bench")
                return 0
            print(f"measuring between two hosts at {options.rate}, for some minutes ...", file=sys.stderr)
            result = run_pair(config, pair.hosts, text=options.text)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (PiperOwnerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; both hosts are gone", file=sys.stderr)
        return 130
    show(result, config, options)
    return 0


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it (default: %(default)s)")
    parser.add_argument(
        "--burst",
        default="1mb",
        help="what passes at once after a pause, as tc writes it (default: %(default)s)",
    )
    add_options(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the totals (default: none)")
    return parser.parse_args()


def bits_per_second(text: str) -> float:
    """The rate that tc understands by `text`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.lower())
    if found is None:
        raise ConfigError(f"--rate {text}: give a number and bit, kbit, mbit or gbit, such as 1gbit")
    return float(found[1]) * UNITS[found[2]]


def end(number: int, _frame: FrameType | None) -> NoReturn:
    """Let SIGTERM go through every `finally`."""
    raise SystemExit(128 + number)


def show(result: BenchResult, config: BenchConfig, options: argparse.Namespace) -> None:
    """Print the tables, and write the files that were asked for."""
    print(f"{result.title()}; burst {options.burst}, median of {config.rounds} rounds")
    print_table(WAYS_HEADER, result.way_cells())
    if result.steps:
        train = config.train_config("dense")
        print(
            f"\n2 stages, 1F1B, {train.vocab:,} x {train.hidden}, {train.layers} layers, "
            f"{train.microbatches} microbatches, {train.tokens_per_step:,} tokens per step"
        )
        print_table(STEPS_HEADER, result.step_cells())
        print()
        print_table(EXPOSED_HEADER, result.exposed_cells())
    print("", *result.notes(), sep="\n")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"load of this machine over 1, 5 and 15 minutes: {load} on {os.cpu_count()} cores")
    if options.json is not None:
        options.json.write_text(json.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")
    if options.plot is not None:
        plot(result, options.plot)


def print_table(header: tuple[str, ...], cells: Sequence[tuple[str, ...]]) -> None:
    """Print columns as wide as they need to be."""
    widths = [max(len(row[column]) for row in (header, *cells)) for column in range(len(header))]
    for row in (header, *cells):
        first, *others = zip(row, widths, strict=True)
        print(first[0].ljust(first[1]), *(text.rjust(width) for text, width in others), sep="  ")


def plot(result: BenchResult, file: Path) -> None:
    """Draw sync and step of each way, stacked, with the limit of the link as a line across its bar."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [way.value for way in result.ways]
    figures = list(result.ways.values())
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    syncs = [each.sync_seconds for each in figures]
    axes.bar(names, syncs, label="sync")
    axes.bar(names, [each.step_seconds for each in figures], bottom=syncs, label="step")
    for place, each in enumerate(figures):
        axes.hlines(each.limit_seconds, place - 0.4, place + 0.4, color="black", linestyles="dashed")
    axes.set_ylabel("seconds (dashed: limit of the link)")
    axes.set_title(result.title(), fontsize=9)
    axes.legend()
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
