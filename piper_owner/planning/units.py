"""Sizes, rates and times as people write them. Pure."""

from __future__ import annotations

import math
import re
from typing import Final

from piper_owner.errors import ConfigError

__all__ = ["parse_bytes", "parse_rate", "parse_seconds"]

_PREFIXES: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}
_NUMBER: Final = r"(?P<number>\d{1,30}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,3})?)\s*"
_SIZE: Final = re.compile(_NUMBER + r"(?P<prefix>[kKmMgGtTpP]?)(?P<binary>i?)(?P<unit>B|[bB]ytes?|)")
_RATE: Final = re.compile(
    _NUMBER + r"(?P<prefix>[kKmMgGtTpP]?)(?P<binary>i?)(?P<unit>B|[bB]ytes?|[bB]its?|bps|)(?:/s|ps)?"
)
_TIME: Final = re.compile(_NUMBER + r"(?P<unit>s|ms|us|ns|)")
_SECONDS: Final = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_LONGEST: Final = 60


def parse_bytes(option: str, text: str) -> int:
    """Bytes, such as `80GB`, `4MiB` or a plain number. Raises ConfigError that names `option`."""
    found = _match(_SIZE, text)
    value = _scaled(found) if found else 0.0
    if not 1 <= value < 2**63:
        raise ConfigError(f"{option} {_cut(text)}: give a size, such as 80GB, 4MiB, or a number of bytes")
    return int(value)


def parse_rate(option: str, text: str) -> float:
    """Bytes per second: `25GB/s`, `1gbit`, `100Gbit/s`, or a plain number of bytes per second.

    Raises ConfigError that names `option`, also for `Gb/s`, which some read as bytes and some as bits.
    """
    found = _match(_RATE, text)
    value = _scaled(found) if found else 0.0
    if found and found["unit"].lower() in ("bit", "bits", "bps"):
        value /= 8
    if not 0 < value < math.inf:
        raise ConfigError(
            f"{option} {_cut(text)}: give a rate, such as 25GB/s, 100Gbit/s, or a number of bytes per second"
        )
    return value


def parse_seconds(option: str, text: str) -> float:
    """Seconds: `5us`, `0.2ms`, or a plain number. Raises ConfigError that names `option`."""
    found = _match(_TIME, text)
    value = float(found["number"]) * _SECONDS[found["unit"]] if found else math.inf
    if not 0 <= value < math.inf:
        raise ConfigError(f"{option} {_cut(text)}: give a time, such as 5us, 0.2ms, or a number of seconds")
    return value


def _match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return pattern.fullmatch(text.strip()) if len(text) <= _LONGEST else None


def _scaled(found: re.Match[str]) -> float:
    scale = (_BINARY if found["binary"] else _PREFIXES)[found["prefix"].lower()]
    return float(found["number"]) * scale


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
