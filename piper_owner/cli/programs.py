"""Reads the schedule program that the command is given. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from piper_owner.directives import Program, parse_program
from piper_owner.paths import read_text_file

__all__ = ["read_program"]


def read_program(path: Path) -> Program:
    """The schedule program in the file at `path`.

    Raises ConfigError if it cannot be read, DirectiveError for what is wrong inside.
    """
    text = read_text_file(path, what="schedule program", name=f"--directives {path}")
    return parse_program(text, source=str(path))
