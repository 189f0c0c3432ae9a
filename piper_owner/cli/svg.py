"""The rank x time grid as a drawing: one self-contained SVG. It needs no torch."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator, Set
from typing import Final, assert_never
from xml.sax.saxutils import escape

from piper_owner.dag.nodes import (
    Across,
    Action,
    BucketStep,
    Collective,
    Compute,
    ComputeKind,
    Sync,
    SyncKind,
    Transfer,
    format_action,
)
from piper_owner.simulate import Timeline

__all__ = ["draw"]

_UNIT: Final = 34.0
_WIDEST: Final = 30_000.0
_ROW: Final = 30.0
_LEFT: Final = 70.0
_TOP: Final = 58.0
_LETTER: Final = 6.6
_RIGHT: Final = 20.0
_RIGHT_OF_WRONG: Final = 180.0
_NARROW: Final = 560.0
_TICKS: Final = 24
_WRONG: Final = "#d00000"

# Hue and saturation by what an action is.
_COLOURS: Final = {
    "forward": (0.58, 0.65),
    "backward": (0.36, 0.45),
    "backward, input": (0.48, 0.50),
    "backward, weights": (0.10, 0.75),
    "step": (0.0, 0.0),
    "sync": (0.80, 0.40),
    "message": (0.0, 0.0),
}


def draw(timeline: Timeline, *, title: str, num_microbatches: int, wrong: Set[tuple[int, int]]) -> str:
    """The SVG text, plain ASCII: a row a rank, a rectangle for each action that takes time.

    Colour tells what an action is, its shade the microbatch (later ones are darker). The cells
    `wrong`, each a rank and a position in its program, are outlined in red, messages too. Each
    rectangle has its text form as label, where that fits, and as tooltip.
    """
    span = max([timeline.makespan, *(starts[-1] + 1 for starts in timeline.starts if starts)], default=1.0)
    unit = min(_UNIT, _WIDEST / max(span, 1.0))
    shown: set[str] = set()
    rows = [
        line
        for rank in range(len(timeline.programs))
        for line in _rank(timeline, rank, unit, num_microbatches, wrong, shown)
    ]
    width = max(_LEFT + span * unit + (_RIGHT_OF_WRONG if wrong else _RIGHT), _NARROW)
    height = _TOP + len(timeline.programs) * _ROW + 30
    letters = int((width - 20) / _LETTER)
    shown_title = title if len(title) <= letters else title[: letters - 4] + " ..."
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="11">',
        f"<title>{_text(title)}</title>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        f'<text x="10" y="20" font-weight="bold">{_text(shown_title)}</text>',
        *_legend(shown, bool(wrong)),
    ]
    return "\n".join([*head, *_axis(span, unit, height - 26), *rows, "</svg>"]) + "\n"


def _rank(
    timeline: Timeline,
    rank: int,
    unit: float,
    num_microbatches: int,
    wrong: Set[tuple[int, int]],
    shown: set[str],
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
        label = f'<text x="{x + wide / 2:.1f}" y="{y + 18:.1f}" text-anchor="middle">{_text(text)}</text>'
    elif bad:  # beyond its rectangle, readable over what comes next
        halo = 'stroke="#ffffff" stroke-width="3" paint-order="stroke"'
        label = f'<text x="{x + 5:.1f}" y="{y + 18:.1f}" {halo}>{_text(text)}</text>'
    return (
        f'<g><title>{_text(text)}</title><rect x="{x:.1f}" y="{y + 2:.1f}" width="{wide:.1f}" '
        f'height="{_ROW - 4:.1f}" rx="2" fill="{fill}" {edge}/>{label}</g>'
    )


def _colour(action: Action, num_microbatches: int) -> tuple[str, str]:
    """What the legend calls `action`, and its colour."""
    microbatch = 0
    match action:
        case Compute(kind=kind, microbatch=microbatch):
            name = _compute(kind)
        case BucketStep() | Sync(kind=SyncKind.OWNER_STEP):
            name = "step"
        case Sync() | Collective() | Across():
            name = "sync"
        case Transfer():
            name = "message"
        case _:
            assert_never(action)
    depth = microbatch / max(1, num_microbatches - 1)
    return name, _rgb(name, depth)


def _compute(kind: ComputeKind) -> str:
    match kind:
        case ComputeKind.FORWARD:
            return "forward"
        case ComputeKind.BACKWARD:
            return "backward"
        case ComputeKind.BACKWARD_INPUT:
            return "backward, input"
        case ComputeKind.BACKWARD_WEIGHT:
            return "backward, weights"
        case _:
            assert_never(kind)


def _rgb(name: str, depth: float) -> str:
    hue, saturation = _COLOURS[name]
    parts = colorsys.hls_to_rgb(hue, 0.88 - 0.30 * depth, saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def _legend(shown: Set[str], wrong: bool) -> Iterator[str]:
    x = 10.0
    for name in _COLOURS:
        if name in shown:
            yield f'<rect x="{x:.0f}" y="32" width="14" height="14" rx="2" fill="{_rgb(name, 0.4)}"/>'
            yield f'<text x="{x + 19:.0f}" y="43">{name}</text>'
            x += 32 + _LETTER * len(name)
    if wrong:
        yield (
            f'<rect x="{x:.0f}" y="33" width="12" height="12" rx="2" fill="none" stroke="{_WRONG}" '
            'stroke-width="3"/>'
        )
        yield f'<text x="{x + 19:.0f}" y="43">wrong</text>'


def _axis(span: float, unit: float, y: float) -> Iterator[str]:
    step = max(1, math.ceil(span / _TICKS))
    for time in range(0, math.ceil(span) + 1, step):
        x = _LEFT + time * unit
        yield f'<path d="M{x:.1f} {_TOP:.0f}V{y:.0f}" stroke="#000000" stroke-opacity="0.12"/>'
        yield f'<text x="{x:.1f}" y="{y + 14:.0f}" text-anchor="middle" fill="#555555">{time}</text>'


def _text(text: str) -> str:
    return escape(text.encode("ascii", "backslashreplace").decode("ascii"))
