"""Where a command writes: the file that was asked for, and the cache. It needs no torch."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["cache_folder", "write_json", "write_text"]


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` to `path` as JSON, whole or not at all. Raises OSError."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write `text`, plain ASCII, to `path`, whole or not at all. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="ascii")  # a pipe or a device cannot be replaced
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="ascii")
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def cache_folder() -> Path:
    """Where learnt vocabularies are kept, by the XDG rules: a relative path there does not count."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if given and Path(given).is_absolute():
        return Path(given) / "piper-owner"
    return Path("~/.cache/piper-owner").expanduser()
