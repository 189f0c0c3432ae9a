"""Figures as text for people."""

from __future__ import annotations

import math

__all__ = ["format_bytes", "format_difference", "format_seconds"]


def format_bytes(count: int) -> str:
    """`count` in decimal units with three significant digits, such as `4.19 MB`."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    if units[0] == "B":
        return f"{count} B"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {units[0]}"


def format_difference(value: float) -> str:
    """An absolute difference, such as `0.13` or `2.4e-07`; `not a number` for NaN."""
    if math.isnan(value):
        return "not a number"
    return "0" if value == 0 else f"{value:.2g}" if value >= 0.01 else f"{value:.1e}"


def format_seconds(value: float) -> str:
    """A duration, such as `1.32 s` or `85 ms`."""
    return (
        f"{value:.2f} s"
        if value >= 0.9995
        else f"{value * 1000:.0f} ms"
        if value >= 0.01
        else f"{value * 1000:.1f} ms"
    )
