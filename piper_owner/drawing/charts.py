"""Charts as SVG for a page: curves, and stacked bars. Pure.

They take their colours from the page's style sheet (`piper_owner.drawing.page`), are as wide as their
container, and are drawn for a width of 360 pixels, so that their words stay readable on a phone. Each has a
title and a description for those who do not see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape, quoteattr

__all__ = ["COLOURS", "Bar", "BarGroup", "Curve", "attribute", "curves", "plain", "stacked_bars"]

COLOURS: Final = 8
"""How many colours a page has for parts of a chart; more parts begin again with the first."""

_WIDTH: Final = 360.0
_HEIGHT: Final = 230.0
_LEFT: Final = 46.0
_RIGHT: Final = 10.0
_TOP: Final = 8.0
_BOTTOM: Final = 34.0
_LETTER: Final = 6.2
_BAR: Final = 18.0
_LABEL_SPACE: Final = 58.0
_VALUE_SPACE: Final = 66.0
_MOST_BARS: Final = 64
_DASHES: Final = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Values at 1, 2, 3, ...; those that are not finite are left out."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar: its parts by kind, of which those that are 0 do not show."""

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """The length of the bar."""
        return math.fsum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class BarGroup:
    """Bars that belong together, under a name."""

    name: str
    bars: tuple[Bar, ...]


def plain(text: str) -> str:
    """`text` for HTML and XML, plain ASCII; what is not ASCII is a character reference."""
    return escape(text).encode("ascii", "xmlcharrefreplace").decode("ascii")


def attribute(text: str) -> str:
    """`text` as the value of an attribute, quotes included."""
    return quoteattr(text).encode("ascii", "xmlcharrefreplace").decode("ascii")


def curves(lines: Sequence[Curve], *, title: str, across: str, up: str) -> str:
    """Curves over 1, 2, 3, ...; `across` and `up` name the axes.

    Colours, dashes and a legend tell them apart; of equal ones the later are drawn thinner, over the earlier.
    """
    finite = [value for line in lines for value in line.values if math.isfinite(value)]
    steps = max((len(line.values) for line in lines), default=1)
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - 0.5, high + 0.5
    ticks = _ticks(low, high, 4)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    legend, legend_height = _legend([line.name for line in lines], is_line=True)
    bottom = _HEIGHT - _BOTTOM

    def x_of(step: float) -> float:
        return _LEFT + (step - 1) / max(1, steps - 1) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - _TOP)

    body = []
    for tick in ticks:
        y = y_of(tick)
        body.append(f'<path class="grid" d="M{_LEFT:.0f} {y:.1f}H{_WIDTH - _RIGHT:.0f}"/>')
        body.append(f'<text x="{_LEFT - 5:.0f}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    marks = [tick for tick in _ticks(1, steps, 5) if tick >= 1 and tick == int(tick)] or [1.0]
    for tick in sorted({1.0, *marks}) if steps < 10 else marks:
        body.append(f'<text x="{x_of(tick):.1f}" y="{bottom + 14:.0f}" text-anchor="middle">{tick:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    body.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 5:.0f}" text-anchor="middle">{plain(across)}</text>')
    for place, line in enumerate(lines):
        thick = 1.5 + 1.2 * (len(lines) - 1 - place)
        dash = f' stroke-dasharray="{_DASHES[place % len(_DASHES)]}"' if place % len(_DASHES) else ""
        for path in _paths(line, x_of, y_of):
            body.append(f'<path class="line c{place % COLOURS}" d="{path}"{dash} stroke-width="{thick:g}"/>')
    words = "; ".join(_in_words(line) for line in lines)
    moved = f'<g transform="translate(0 {legend_height:.0f})">' + "".join(body) + "</g>"
    return _svg(_HEIGHT + legend_height, title, f"{up} by {across}. {words}.", [*legend, moved])


def _in_words(line: Curve) -> str:
    finite = [value for value in line.values if math.isfinite(value)]
    return f"{line.name}: from {finite[0]:g} to {finite[-1]:g}" if finite else f"{line.name}: no finite value"


def _paths(line: Curve, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> Iterator[str]:
    """The pieces of a curve between values that are not finite; a single value is a dot."""
    piece: list[str] = []
    for step, value in enumerate((*line.values, math.nan), 1):
        if math.isfinite(value):
            piece.append(f"{x_of(step):.1f} {y_of(value):.1f}")
        elif piece:
            yield "M" + ("L".join(piece) if len(piece) > 1 else f"{piece[0]}h0.1")
            piece = []


def stacked_bars(groups: Sequence[BarGroup], *, title: str, format_value: Callable[[float], str]) -> str:
    """Horizontal bars in groups, all to one scale, with their totals; kinds in the order in which they come.

    Of very many bars the first ones show, and a line says how many more there are.
    """
    kinds = list(dict.fromkeys(kind for group in groups for bar in group.bars for kind in bar.parts))
    most = max((bar.total for group in groups for bar in group.bars), default=0.0) or 1.0
    scale = (_WIDTH - _LABEL_SPACE - _VALUE_SPACE) / most
    body, y = _legend(kinds, is_line=False)
    shown = 0
    for group in groups:
        bars = group.bars[: _MOST_BARS - shown]
        if not bars:
            break
        body.append(f'<text class="head" x="0" y="{y + 13:.0f}">{plain(group.name)}</text>')
        y += _BAR
        for bar in bars:
            body += _bar(bar, kinds, y, scale, format_value)
            y += _BAR
        y += 6
        shown += len(bars)
    hidden = sum(len(group.bars) for group in groups) - shown
    if hidden:
        body.append(f'<text x="0" y="{y + 13:.0f}">and {hidden} more</text>')
        y += _BAR
    words = "; ".join(
        f"{group.name}: "
        + ", ".join(f"{bar.label} {format_value(bar.total)}" for bar in group.bars[:_MOST_BARS])
        for group in groups
    )
    return _svg(y, title, f"{words}.", body)


def _bar(
    bar: Bar, kinds: Sequence[str], y: float, scale: float, format_value: Callable[[float], str]
) -> Iterator[str]:
    yield f'<text x="{_LABEL_SPACE - 6:.0f}" y="{y + 12:.0f}" text-anchor="end">{plain(bar.label)}</text>'
    x = _LABEL_SPACE
    for place, kind in enumerate(kinds):
        value = bar.parts.get(kind, 0.0)
        if value > 0:
            tip = f"{bar.label}, {kind}: {format_value(value)}"
            yield (
                f'<rect class="part c{place % COLOURS}" x="{x:.2f}" y="{y + 1:.0f}" '
                f'width="{max(value * scale, 0.5):.2f}" height="{_BAR - 4:.0f}"><title>{plain(tip)}</title>'
                "</rect>"
            )
            x += value * scale
    yield f'<text x="{x + 5:.1f}" y="{y + 12:.0f}">{plain(format_value(bar.total))}</text>'


def _legend(names: Sequence[str], *, is_line: bool) -> tuple[list[str], float]:
    """The elements, in as many rows as they need, and their height."""
    x, y, elements = 0.0, 0.0, []
    for place, name in enumerate(names):
        wide = 24 + _LETTER * len(name) + 14
        if x and x + wide > _WIDTH:
            x, y = 0.0, y + 16
        colour = f"c{place % COLOURS}"
        if is_line:
            dash = f' stroke-dasharray="{_DASHES[place % len(_DASHES)]}"' if place % len(_DASHES) else ""
            elements.append(
                f'<path class="line {colour}" d="M{x:.0f} {y + 8:.0f}h18"{dash} stroke-width="2.5"/>'
            )
        else:
            elements.append(
                f'<rect class="part {colour}" x="{x:.0f}" y="{y + 2:.0f}" width="12" height="12"/>'
            )
        elements.append(f'<text x="{x + 22:.0f}" y="{y + 12:.0f}">{plain(name)}</text>')
        x += wide
    return elements, y + 22 if names else 0.0


def _ticks(low: float, high: float, count: int) -> list[float]:
    """At most about `count` round numbers from below `low` to above `high`."""
    raw = (high - low) / count
    if raw <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


def _svg(height: float, title: str, description: str, body: Sequence[str]) -> str:
    size = f"0 0 {_WIDTH:.0f} {height:.0f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="{size}" role="img" '
        f"aria-label={attribute(f'{title}. {description}')}>"
        f"<title>{plain(title)}</title><desc>{plain(description)}</desc>" + "\n".join(body) + "</svg>"
    )
