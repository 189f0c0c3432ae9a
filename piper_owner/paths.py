"""Paths that a user gives, checked before anything starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from piper_owner.errors import ConfigError

__all__ = [
    "MAX_TEXT_BYTES",
    "check_folder",
    "check_output",
    "check_outputs",
    "path_option",
    "read_text_file",
    "readable",
]

MAX_TEXT_BYTES: Final = 64 * 2**20
"""The largest file of options or of a schedule that is read."""
_LONGEST: Final = 2000


def readable(text: str) -> str:
    """`text` on one line that every terminal shows: what it cannot print is spelled as in Python, and a long
    one is cut in the middle."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def path_option(text: str) -> Path:
    """The path that an option gives, as argparse wants it: ArgumentTypeError for what is none."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is no path")
    return Path(text)


def check_output(option: str, file: Path | None) -> None:
    """Raise ConfigError if `file`, which `option` names, cannot be written. Writes nothing."""
    if file is None:
        return
    try:
        if file.is_dir():
            raise ConfigError(f"{option} {file}: this is a folder; give the name of a file")
        _check_parent(option, file)
        if not file.exists():
            # The name that it has until it is whole is longer.
            file.with_name(f".{file.name}.{os.getpid()}.tmp").exists()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {file}: cannot write there: {_reason(error)}") from error


def check_outputs(outputs: Sequence[tuple[str, Path | None]]) -> None:
    """`check_output` of each of the (option, file); ConfigError also where two of them are one file."""
    taken: dict[Path, str] = {}
    for option, file in outputs:
        check_output(option, file)
        if file is None or (file.exists() and not file.is_file()):  # a device takes any number
            continue
        # Not file.resolve(), which raises for a link to itself: what is written replaces a link.
        other = taken.setdefault(file.parent.resolve() / file.name, option)
        if other != option:
            raise ConfigError(f"{option} {file}: {other} writes to it too; give each a file of its own")


def check_folder(option: str, folder: Path | None) -> None:
    """Raise ConfigError if `folder`, which `option` names, cannot be written to or made. Makes nothing."""
    if folder is None:
        return
    try:
        if folder.is_dir():
            return
        if folder.exists():
            raise ConfigError(f"{option} {folder}: this is a file; give the name of a folder")
        _check_parent(option, folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {folder}: cannot write there: {_reason(error)}") from error


def _check_parent(option: str, path: Path) -> None:
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"{option} {path}: the folder {path.parent} does not exist; make it first")
    if not path.exists() and not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: the folder {path.parent} must not be written to")


def read_text_file(path: Path, *, what: str, name: str | None = None) -> str:
    """The text of the file. Raises ConfigError if it is missing, too large, binary, or cannot be read.

    `what` it should be and is not, and `name` (by default the path) are for the error.
    """
    name = str(path) if name is None else name
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: cannot read it: {_reason(error)}") from error
    if len(content) > MAX_TEXT_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_TEXT_BYTES // 2**20} MiB; this is no {what}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: byte {error.start} is no UTF-8 text; this is no {what}") from None
    if "\0" in text:
        raise ConfigError(f"{name}: this is a binary file, no {what}")
    return text


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
