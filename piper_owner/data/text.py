"""The text to train on: a file, a folder, or the Python standard library's own source.

Reading is deterministic: files come in the order of their relative paths, bytes are taken as they
are (UTF-8, no newline translation), and the result ends on a whole character.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from piper_owner.errors import ConfigError, DataError

__all__ = ["DEFAULT_LIMIT_BYTES", "Text", "read_text"]

DEFAULT_LIMIT_BYTES: Final = 8 * 2**20
"""Enough for thousands of steps, and little enough to learn a vocabulary in seconds."""

_STANDARD_LIBRARY: Final = "the Python standard library's source"

# Folders of the standard library that are no program text of its own, or mere tables.
_NOT_SOURCE: Final = frozenset(
    {
        "dist-packages",
        "encodings",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Text, where it came from, from how many files, and whether the limit cut it short."""

    content: str
    source: str
    num_files: int
    truncated: bool

    @property
    def digest(self) -> str:
        """32 hex digits that depend on the content alone."""
        return hashlib.blake2b(self.content.encode(), digest_size=16).hexdigest()


class _NotText(Exception):
    """Why a file is no text; its message completes "<path> ..."."""


def read_text(path: Path | None, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Text:
    """Read the text at `path`, at most its first `limit_bytes` bytes.

    None reads the Python standard library's own source. A file is read whole. A folder is read
    recursively; hidden files and folders, links to folders and files that are not UTF-8 text are
    left out.

    Raises DataError, naming the path and the remedy, for a path that is missing, unreadable,
    empty, or no text, and ConfigError for a limit below 1. Local and deterministic.
    """
    if limit_bytes < 1:
        raise ConfigError(f"limit_bytes={limit_bytes}: at least 1 byte of text is needed")
    if path is None:
        return _read_standard_library(limit_bytes)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise DataError(_cannot_read(path, error)) from error
    if stat.S_ISDIR(mode):
        return _read_folder(path, limit_bytes)
    if stat.S_ISREG(mode):
        return _read_file(path, limit_bytes)
    raise DataError(f"{path} is neither a file nor a folder; give a text file, or a folder of text files")


def _read_standard_library(limit_bytes: int) -> Text:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(root, _NOT_SOURCE) if file.suffix == ".py"]
    text = _join(files, limit_bytes, source=_STANDARD_LIBRARY)
    if not text.content.strip():
        raise DataError(f"this Python has no source files in {root}; give a text with --text PATH")
    return text


def _read_folder(path: Path, limit_bytes: int) -> Text:
    text = _join(_walk(path), limit_bytes, source=str(path))
    if not text.content.strip():
        raise DataError(
            f"the folder {path} holds no text: no file in it is UTF-8 text with anything in it (hidden "
            "ones do not count); give a folder with text files, or one text file"
        )
    return text


def _read_file(path: Path, limit_bytes: int) -> Text:
    try:
        content, truncated = _decode(path, limit_bytes)
    except _NotText as error:
        raise DataError(f"{path} {error}") from error
    if not content.strip():
        raise DataError(f"{path} is empty: there is nothing to train on; give a file with text in it")
    return Text(content=content, source=str(path), num_files=1, truncated=truncated)


def _join(files: list[Path], limit_bytes: int, *, source: str) -> Text:
    parts: list[str] = []
    left = limit_bytes
    truncated = False
    for file in files:
        if left <= 0:
            truncated = True
            break
        try:
            content, truncated = _decode(file, left)
        except _NotText:
            continue
        if content:
            parts.append(content)
            left -= len(content.encode())
        if truncated:
            break
    return Text(content="".join(parts), source=source, num_files=len(parts), truncated=truncated)


def _walk(root: Path, without: frozenset[str] = frozenset()) -> list[Path]:
    """Regular files below `root`, by relative path; hidden ones and folders of `without` left out."""

    def fail(error: OSError) -> None:
        raise DataError(_cannot_read(Path(error.filename or root), error)) from error

    def entries() -> Iterator[Path]:
        for folder, folders, names in os.walk(root, onerror=fail):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
            for name in names:
                file = Path(folder, name)
                # A link that leads nowhere, a socket or a pipe is no text; reading one could hang.
                if not name.startswith(".") and file.is_file():
                    yield file

    return sorted(entries(), key=lambda file: file.relative_to(root).parts)


def _decode(path: Path, limit_bytes: int) -> tuple[str, bool]:
    """The first `limit_bytes` of a file as whole characters, and whether there is more."""
    try:
        with path.open("rb") as file:
            raw = file.read(limit_bytes + 1)
    except OSError as error:
        raise DataError(_cannot_read(path, error)) from error
    truncated = len(raw) > limit_bytes
    raw = raw[:limit_bytes]
    if b"\0" in raw:
        raise _NotText(
            "is a binary file (it holds NUL bytes): give a text file; one in UTF-16 must be converted "
            "to UTF-8 first"
        )
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        # A character that the limit cuts in two is left out; one that the file itself cuts is an error.
        return decoder.decode(raw, final=not truncated), truncated
    except UnicodeDecodeError as error:
        raise _NotText(
            f"is not UTF-8 text (byte {error.start}: {error.reason}): give a text file; one in another "
            "encoding must be converted to UTF-8 first"
        ) from error


def _cannot_read(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path} does not exist; give the path of a text file, or of a folder of text files"
    reason = getattr(error, "strerror", None) or error
    return f"{path} cannot be read ({reason}); allow reading it, or give another text"
