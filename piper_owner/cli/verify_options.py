"""The command line of `piper-owner verify`; it needs no torch."""

from __future__ import annotations

import argparse
from typing import Final

from piper_owner.paths import path_option

__all__ = ["add_verify"]

_DESCRIPTION: Final = """\
Check a schedule without starting anything: every rule of a training step, that
every message has its receiver, that no ranks wait for one another, and that
the messages of each pair of ranks have one order. Print the rank x time grid,
with what is wrong marked >>like this<<.

FILE holds, told by its content, one of
  a schedule program    a JSON array of directives (docs/directives.md); its
                        regions are those that its "place" directives name
  a TrainingDAG         its text form, 'training_dag ...'
  a torch schedule      CSV as torch.distributed.pipelining saves it, with or
                        without sends and recvs

Times are in units: a forward takes 1, a backward 2, each half of it 1.
"""

_EXAMPLES: Final = """\
examples:
  piper-owner verify schedule.json
  piper-owner verify schedule.csv --svg schedule.svg
  piper-owner verify schedule.json --edges 0-1,0-2,1-2

exit status:
  0 the schedule is right, 2 it is wrong or cannot be read, 1 an output file
  could not be written
"""


def add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    verify = commands.add_parser(
        "verify",
        help="check a schedule program, a TrainingDAG or a torch schedule",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verify.add_argument("file", type=path_option, metavar="FILE", help="the schedule")
    verify.add_argument(
        "--edges",
        metavar="A-B,..",
        help="which region of a schedule program feeds which, an earlier one a later one (default: a chain)",
    )
    verify.add_argument(
        "--max-rows",
        type=_count,
        default=40,
        metavar="N",
        help="print at most N rows of the grid (40)",
    )
    verify.add_argument(
        "--max-ranks",
        type=_count,
        default=8,
        metavar="N",
        help="print at most N ranks of the grid (8)",
    )
    verify.add_argument("--json", type=path_option, metavar="FILE", help="write the verdict to FILE")
    verify.add_argument("--svg", type=path_option, metavar="FILE", help="draw the whole grid into FILE")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:10]) < 10**9 and len(text) < 10):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no positive number")
    return int(text)
