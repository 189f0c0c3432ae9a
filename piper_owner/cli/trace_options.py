"""The options of `piper-owner train` that keep pictures of a run. It needs no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from piper_owner.errors import ConfigError
from piper_owner.paths import check_folder, check_outputs, path_option

__all__ = ["PictureOptions", "add_pictures", "read_pictures"]

_TRACE_STEPS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureOptions:
    """Which files to write, and how many steps, the last ones, they show."""

    trace: Path | None = None
    profile: Path | None = None
    report: Path | None = None
    steps: int = _TRACE_STEPS

    @property
    def records(self) -> bool:
        """Whether a run has to be recorded."""
        return any(path is not None for path in (self.trace, self.profile, self.report))


def add_pictures(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of `train`."""
    group = parser.add_argument_group("pictures")
    group.add_argument(
        "--report",
        type=path_option,
        default=None,
        metavar="FILE",
        help="write an HTML page that needs no network: loss curves, memory, the timeline of the last step, "
        "all figures (default: none)",
    )
    group.add_argument(
        "--trace",
        type=path_option,
        default=None,
        metavar="FILE",
        help="write what each rank of the owner run did when, a row for each, and its messages, as JSON that "
        "Perfetto (ui.perfetto.dev) and chrome://tracing open (default: none)",
    )
    group.add_argument(
        "--profile",
        type=path_option,
        default=None,
        metavar="DIR",
        help="run torch's profiler in the same steps, and write its trace for each rank to this folder, as "
        "rank0.json.gz and so on (default: none)",
    )
    group.add_argument(
        "--trace-steps",
        type=int,
        default=_TRACE_STEPS,
        metavar="N",
        help="how many steps, the last ones, --trace and --profile record (default: %(default)s)",
    )


def read_pictures(arguments: argparse.Namespace) -> PictureOptions:
    """What the parsed arguments ask for.

    Raises ConfigError for a path that cannot be written, and for fewer steps than one.
    """
    options = PictureOptions(
        trace=arguments.trace,
        profile=arguments.profile,
        report=arguments.report,
        steps=arguments.trace_steps,
    )
    if options.steps < 1:
        raise ConfigError(f"--trace-steps {options.steps}: at least one step is needed")
    check_folder("--profile", options.profile)
    check_outputs([("--json", arguments.json), ("--trace", options.trace), ("--report", options.report)])
    return options
