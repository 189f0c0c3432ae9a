"""The rank x time grid as a drawing: one self-contained SVG. Pure."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from piper_owner.dag.nodes import Across, Action, Collective, Compute, Transfer, format_action
from piper_owner.simulate import Timeline
from piper_owner.tracing.events import Family, family_of

__all__ = ["Arrow", "Look", "draw"]

_UNIT: Final = 34.0
_WIDEST: Final = 30_000.0
_ROW: Final = 30.0
_LEFT: Final = 70.0
_TOP: Final = 58.0
_TITLE: Final = 26.0
_LETTER: Final = 6.6
_RIGHT: Final = 20.0
_RIGHT_OF_WRONG: Final = 180.0
_NARROW: Final = 560.0
_TICKS: Final = 24
_TICK_WIDTH: Final = 60.0
_ARROW: Final = "#8a1c7c"
_HEAD: Final = 8.0
_WRONG: Final = "#d00000"
_LABEL: Final = 'text-anchor="middle" fill="#000000"'

# Hue and saturation by what an action is.
_COLOURS: Final = {
    Family.FORWARD: (0.58, 0.65),
    Family.BACKWARD: (0.36, 0.45),
    Family.BACKWARD_INPUT: (0.48, 0.50),
    Family.BACKWARD_WEIGHT: (0.10, 0.75),
    Family.STEP: (0.0, 0.0),
    Family.SYNC: (0.80, 0.40),
    Family.MESSAGE: (0.0, 0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """A message to show, from a rank at a time to another one at another; `text` is written beside it."""

    source: int
    sent: float
    target: int
    received: float
    label: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How a drawing looks.

    width: of all of the time, in pixels; 0: each unit of time has the same one. unit: of the axis, and
    `scale`, how many of it a unit of the timeline is. ink, paper: colours of text and ground in CSS,
    where `currentColor` is that of the page around and None no ground. has_title: whether it shows.
    """

    width: float = 0.0
    unit: str = ""
    scale: float = 1.0
    ink: str = "#000000"
    paper: str | None = "#ffffff"
    has_title: bool = True


def draw(
    timeline: Timeline,
    *,
    title: str,
    num_microbatches: int,
    wrong: Set[tuple[int, int]] = frozenset(),
    arrows: Sequence[Arrow] = (),
    look: Look = Look(),
) -> str:
    """The SVG text, plain ASCII: a row a rank, a rectangle for each action that takes time.

    Colour tells what an action is, its shade the microbatch (later ones are darker). The cells
    `wrong`, each a rank and a position in its program, are outlined in red, messages too. Each
    rectangle has its text form as label, where that fits, and as tooltip.
    """
    span = timeline.makespan
    if not look.width:  # what is stuck is as long as a unit
        span = max([span, *(starts[-1] + 1 for starts in timeline.starts if starts)], default=1.0)
    unit = look.width / (span or 1.0) if look.width else min(_UNIT, _WIDEST / max(span, 1.0))
    shown: set[Family] = set()
    rows = [
        line
        for rank in range(len(timeline.programs))
        for line in _rank(timeline, rank, unit, num_microbatches, wrong, shown)
    ]
    width = max(_LEFT + span * unit + (_RIGHT_OF_WRONG if wrong else _RIGHT), _NARROW)
    height = _TOP + len(timeline.programs) * _ROW + 30
    above = 0.0 if look.has_title else _TITLE
    bottom, height = height, height - above
    letters = int((width - 20) / _LETTER)
    shown_title = title if len(title) <= letters else title[: letters - 4] + " ..."
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 {above:.0f} {width:.0f} {height:.0f}" font-family="sans-serif" font-size="11" '
        f'role="img" fill="{look.ink}">',
        f"<title>{_text(title)}</title>",
        *([f'<rect width="{width:.0f}" height="{height:.0f}" fill="{look.paper}"/>'] if look.paper else []),
        *([f'<text x="10" y="20" font-weight="bold">{_text(shown_title)}</text>'] if look.has_title else []),
        *_legend(shown, bool(wrong)),
    ]
    axis = _axis(span, unit, bottom - 26, look)
    pointed = (line for arrow in arrows for line in _arrow(arrow, unit))
    return "\n".join([*head, *axis, *rows, *pointed, "</svg>"]) + "\n"


def _rank(
    timeline: Timeline,
    rank: int,
    unit: float,
    num_microbatches: int,
    wrong: Set[tuple[int, int]],
    shown: set[Family],
) -> Iterator[str]:
    y = _TOP + rank * _ROW
    yield f'<text x="10" y="{y + 18:.0f}">rank {rank}</text>'
    marked = []
    ends = timeline.ends[rank]
    for position, start in enumerate(timeline.starts[rank]):
        action = timeline.programs[rank][position]
        bad = (rank, position) in wrong
        end = ends[position] if position < len(ends) else start + 1
        if end <= start and not bad:
            continue
        # A recv lasts while it waits; what takes time is the rest.
        if not bad and isinstance(action, Transfer | Collective | Across):
            continue
        kind, fill = _colour(action, num_microbatches)
        shown.add(kind)
        x, wide = _LEFT + start * unit, max((end - start) * unit, unit / 2 if bad else 1.0)
        rectangle = _rectangle(x, y, wide, fill, format_action(action), bad)
        if bad:
            marked.append(rectangle)  # drawn last, so that nothing covers it
        else:
            yield rectangle
    yield from marked


def _rectangle(x: float, y: float, wide: float, fill: str, text: str, bad: bool) -> str:
    edge = f'stroke="{_WRONG}" stroke-width="3"' if bad else 'stroke="#ffffff" stroke-width="1"'
    label = ""
    if len(text) * _LETTER <= wide:
        label = f'<text x="{x + wide / 2:.1f}" y="{y + 18:.1f}" {_LABEL}>{_text(text)}</text>'
    elif bad:  # beyond its rectangle, readable over what comes next
        halo = 'stroke="#ffffff" stroke-width="3" paint-order="stroke"'
        label = f'<text x="{x + 5:.1f}" y="{y + 18:.1f}" {halo}>{_text(text)}</text>'
    return (
        f'<g><title>{_text(text)}</title><rect x="{x:.1f}" y="{y + 2:.1f}" width="{wide:.1f}" '
        f'height="{_ROW - 4:.1f}" rx="2" fill="{fill}" {edge}/>{label}</g>'
    )


def _colour(action: Action, num_microbatches: int) -> tuple[Family, str]:
    """The family of `action`, and its colour."""
    microbatch = action.microbatch if isinstance(action, Compute | Transfer) else 0
    family = family_of(action)
    return family, _rgb(family, microbatch / max(1, num_microbatches - 1))


def _rgb(family: Family, depth: float) -> str:
    hue, saturation = _COLOURS[family]
    parts = colorsys.hls_to_rgb(hue, 0.88 - 0.30 * depth, saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def _legend(shown: Set[Family], wrong: bool) -> Iterator[str]:
    x = 10.0
    for family in _COLOURS:
        if family in shown:
            yield f'<rect x="{x:.0f}" y="32" width="14" height="14" rx="2" fill="{_rgb(family, 0.4)}"/>'
            yield f'<text x="{x + 19:.0f}" y="43">{family.value}</text>'
            x += 32 + _LETTER * len(family.value)
    if wrong:
        yield (
            f'<rect x="{x:.0f}" y="33" width="12" height="12" rx="2" fill="none" stroke="{_WRONG}" '
            'stroke-width="3"/>'
        )
        yield f'<text x="{x + 19:.0f}" y="43">wrong</text>'


def _axis(span: float, unit: float, y: float, look: Look) -> Iterator[str]:
    if look.width:
        step = _round_step(span * look.scale / min(_TICKS, max(1.0, look.width / _TICK_WIDTH)))
    else:
        step = float(max(1, math.ceil(span / _TICKS)))
    last = math.ceil(span) if not look.width else math.floor(span * look.scale / step + 1e-9) * step
    for tick in range(round(last // step) + 1):
        x = _LEFT + tick * step / look.scale * unit
        label = f"{tick * step:g}" + (f" {look.unit}" if look.unit and tick == 0 else "")
        yield f'<path d="M{x:.1f} {_TOP:.0f}V{y:.0f}" stroke="{look.ink}" stroke-opacity="0.12"/>'
        yield f'<text x="{x:.1f}" y="{y + 14:.0f}" text-anchor="middle" opacity="0.7">{label}</text>'


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, ... and their tenths that is no less than `least`."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))


def _arrow(arrow: Arrow, unit: float) -> Iterator[str]:
    """A line from the row of the sender to that of the receiver, with a head."""
    down = arrow.target > arrow.source
    x0, y0 = _LEFT + arrow.sent * unit, _TOP + arrow.source * _ROW + (_ROW - 2 if down else 2)
    x1, y1 = _LEFT + arrow.received * unit, _TOP + arrow.target * _ROW + (2 if down else _ROW - 2)
    length = math.hypot(x1 - x0, y1 - y0) or 1.0
    ax, ay = (x1 - x0) / length, (y1 - y0) / length
    head = " ".join(
        f"{x1 - _HEAD * ax + side * _HEAD / 2 * ay:.1f},{y1 - _HEAD * ay - side * _HEAD / 2 * ax:.1f}"
        for side in (1, -1)
    )
    yield f'<g stroke="{_ARROW}" fill="{_ARROW}" stroke-width="1.6"><title>{_text(arrow.label)}</title>'
    yield f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" fill="none"/>'
    yield f'<polygon points="{x1:.1f},{y1:.1f} {head}"/></g>'
    if arrow.text:
        halo = 'stroke="#ffffff" stroke-width="4" paint-order="stroke" font-weight="bold"'
        x, y = (x0 + x1) / 2, (y0 + y1) / 2 + 4
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="middle"'
        yield f'<text {place} fill="{_ARROW}" {halo}>{_text(arrow.text)}</text>'


def _text(text: str) -> str:
    return escape(text.encode("ascii", "backslashreplace").decode("ascii"))
