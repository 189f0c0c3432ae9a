"""The options of `piper-owner train` that keep a run on disk. It needs no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from piper_owner.errors import ConfigError
from piper_owner.paths import check_folder, path_option

__all__ = ["CheckpointOptions", "add_checkpoint", "read_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """Where to keep the owner run (None: nowhere), how often, and whether to go on from what is there; and
    how often runs may begin again after a failure, and after how many steps each to take a snapshot."""

    path: Path | None = None
    every: int | None = None
    resume: bool = False
    max_restarts: int = 0
    snapshot: int | None = None


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of `train`."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--checkpoint",
        type=path_option,
        default=None,
        metavar="DIR",
        help="keep the owner run in this folder, as one copy for any stages, devices, owner and layout; all "
        "machines must see it (default: none)",
    )
    group.add_argument(
        "--every",
        type=int,
        default=None,
        metavar="N",
        help="save after every N steps, and at the end (default: only at the end)",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on from the checkpoint in --checkpoint to --steps, with the same losses as without a break "
        "(default: start anew, in a folder without one)",
    )
    group.add_argument(
        "--max-restarts",
        type=int,
        default=None,
        metavar="K",
        help="when a worker is lost, start another and go on from the last checkpoint, to the same losses; a "
        "run of --compare begins again; at most K times in all (default: end with the error)",
    )
    group.add_argument(
        "--snapshot",
        type=int,
        default=None,
        metavar="N",
        help="after every N steps each worker keeps its state in memory, and a copy at the next worker, so "
        "that a restart loses N steps at most, without a disk (default: none)",
    )


def read_checkpoint(arguments: argparse.Namespace) -> CheckpointOptions:
    """What the parsed arguments ask for. Raises ConfigError for what contradicts itself, or no folder."""
    options = CheckpointOptions(
        path=arguments.checkpoint,
        every=arguments.every,
        resume=arguments.resume,
        max_restarts=arguments.max_restarts or 0,
        snapshot=arguments.snapshot,
    )
    if options.max_restarts < 0:
        raise ConfigError(f"--max-restarts {options.max_restarts}: 0 restarts, or more, are needed")
    if options.snapshot is not None:
        if options.snapshot < 1:
            raise ConfigError(f"--snapshot {options.snapshot}: at least 1 step is needed")
        if not options.max_restarts:
            raise ConfigError("--snapshot needs --max-restarts K: without restarts nothing reads a snapshot")
    if options.every is not None and options.every < 1:
        raise ConfigError(f"--every {options.every}: at least 1 step is needed")
    if options.path is None:
        if options.max_restarts and options.snapshot is None:
            raise ConfigError(
                "--max-restarts needs --checkpoint DIR, or --snapshot N: something to go on from"
            )
        for name, given in (("--every", options.every is not None), ("--resume", options.resume)):
            if given:
                raise ConfigError(f"{name} needs --checkpoint DIR, the folder to keep the run in")
        return options
    check_folder("--checkpoint", options.path)
    return options
