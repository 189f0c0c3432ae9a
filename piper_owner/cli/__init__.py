"""The command `piper-owner`. The only importer of rich."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from piper_owner.cli import options
from piper_owner.errors import InputError, PiperOwnerError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (None: the process's own) and return its exit status.

    0: done. 1: a run failed. 2: bad input, found before anything started. 130: interrupted.
    """
    parser = options.build_parser()
    arguments = parser.parse_args(argv)
    try:
        return _run(arguments)
    except InputError as error:
        return _say(f"error: {error}", 2)
    except (PiperOwnerError, OSError) as error:
        return _say(f"error: {error}", 1)
    except KeyboardInterrupt:
        return _say("interrupted; everything that was started has ended", 130)


def _run(arguments: argparse.Namespace) -> int:
    # Imported only now: torch comes with them, which --help and a wrong option need not wait for.
    if arguments.command == "bench":
        from piper_owner.cli import bench

        return bench.run(arguments)
    if arguments.command == "plan":
        from piper_owner.cli import plan, plan_options

        return plan.run(plan_options.read_plan(arguments))
    if arguments.command == "memory":
        from piper_owner.cli import memory_options

        asked = memory_options.read_memory(arguments)
        from piper_owner.cli import memory

        return memory.run(asked)
    if arguments.command == "verify":
        from piper_owner.cli import verify

        return verify.run(arguments)
    wanted = options.read(arguments)
    from piper_owner.cli import train

    return train.run(wanted)


def _say(message: str, status: int) -> int:
    print(f"piper-owner: {message}", file=sys.stderr)
    return status
