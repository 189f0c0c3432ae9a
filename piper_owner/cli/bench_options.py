"""The command line of `piper-owner bench`; it needs no torch."""

from __future__ import annotations

import argparse
from typing import Final

from piper_owner.bench.config import add_options

__all__ = ["add_bench"]

_DESCRIPTION: Final = """\
Time four ways to keep the two uses of a tied table in step, between two
processes of this machine: an all-reduce of two copies with a step on both
sides; one owner that gets the whole gradient and returns the whole weights;
the same in chunks; and one owner that serves the rows in use. Then whole
training steps of a small GPT on two stages under 1F1B.

sync is communication that is waited for, step adds gradients up and steps the
table, total is both. The limit is that of the payload at the measured rate of
one large message. Over loopback the network is nearly free: the script
scripts/bench_network.py measures the same over a link of a given rate.
"""

_EXAMPLES: Final = """\
examples:
  piper-owner bench
      GPT-2's table, and training steps; some minutes
  piper-owner bench --vocab 32000 --hidden 512 --skip-steps --json FILE
      a smaller table, no training steps, and the figures in a file

exit status:
  0 done, 1 a run failed, 2 bad input (found before anything starts),
  130 interrupted
"""


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    bench = commands.add_parser(
        "bench",
        help="time all-reduce, owner and rows between two processes here",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(bench)
