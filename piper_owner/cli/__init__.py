"""The command `piper-owner`. The only importer of rich."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from piper_owner.cli import options
from piper_owner.errors import DagError, InputError, PiperOwnerError
from piper_owner.paths import readable

__all__ = ["main", "prepare", "refuse"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (None: the process's own) and return its exit status.

    0: done. 1: a run failed. 2: bad input, found before anything started. 130: interrupted.
    """
    try:
        return prepare(argv)()
    except (InputError, DagError) as error:
        return refuse(error)
    except (PiperOwnerError, OSError) as error:
        return _say(f"error: {error}", 1)
    except KeyboardInterrupt:
        return _say("interrupted; everything that was started has ended", 130)


def prepare(argv: Sequence[str] | None) -> Callable[[], int]:
    """What `argv` asks for, checked: nothing is started, and no text is read, before that is called.

    It returns the exit status. Raises InputError and DagError; SystemExit for --help, and for what is no
    command line.
    """
    arguments = options.build_parser().parse_args(argv)
    # Imported only now: torch comes with them, which --help and a wrong option need not wait for.
    if arguments.command == "bench":
        from piper_owner.cli import bench

        return partial(bench.run, bench.read(arguments), arguments)
    if arguments.command == "plan":
        from piper_owner.cli import plan, plan_options

        return partial(plan.run, plan_options.read_plan(arguments))
    if arguments.command == "memory":
        from piper_owner.cli import memory_options

        asked = memory_options.read_memory(arguments)
        from piper_owner.cli import memory

        return partial(memory.run, asked)
    if arguments.command == "verify":
        from piper_owner.cli import verify

        return partial(verify.run, arguments)
    wanted = options.read(arguments)
    from piper_owner.cli import train

    return partial(train.run, *train.check(wanted))


def refuse(error: InputError | DagError) -> int:
    """Say in one line why nothing was started; the exit status."""
    # Of a schedule that must not run the grid stands below; `piper-owner verify` shows it.
    text = str(error) if isinstance(error, InputError) else str(error).partition("\n")[0]
    return _say(f"error: {text}", 2)


def _say(message: str, status: int) -> int:
    print(f"piper-owner: {readable(message)}", file=sys.stderr)
    return status
