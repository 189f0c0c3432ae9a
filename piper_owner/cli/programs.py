"""Reads the schedule program that the command is given. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from piper_owner.directives import Program, parse_program
from piper_owner.errors import ConfigError

__all__ = ["read_program"]


def read_program(path: Path) -> Program:
    """The schedule program in the file at `path`.

    Raises ConfigError if it cannot be read, DirectiveError for what is wrong inside.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--directives {path}: cannot read it: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--directives {path}: it is not text in UTF-8; a schedule program is a JSON array of directives"
        ) from error
    return parse_program(text, source=str(path))
