"""One self-contained HTML page: sections of charts, tables and text. Pure.

It has its style inside, asks nothing of any network and runs no script. Its colours follow what the reader
prefers, light or dark; on a narrow screen wide parts scroll in their own frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from piper_owner.drawing.charts import COLOURS, attribute, plain

__all__ = ["Section", "page", "paragraphs", "table", "wide"]

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #ffffff; --card: #f6f8fa; --soft: #57606a;
  --line: #d0d7de; --c0: #2563a8; --c1: #c2410c; --c2: #15803d; --c3: #7e22ce; --c4: #b45309;
  --c5: #0e7490; --c6: #be185d; --c7: #64748b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --card: #161b22;
  --soft: #9aa5b1; --line: #30363d; --c0: #7db5f0; --c1: #fb9a5b; --c2: #6fd08c; --c3: #c99af5;
  --c4: #e3b341; --c5: #5cc8dc; --c6: #f48fb8; --c7: #a3b1c2; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1200px; margin: 0 auto; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.1rem; margin: 0 0 .5rem; }
p { margin: .4rem 0; overflow-wrap: anywhere; }
.note { color: var(--soft); font-size: .9rem; }
.sections { display: grid; gap: 1rem; margin-top: 1.2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 350px), 1fr)); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 1rem;
  min-width: 0; }
section.wide { grid-column: 1 / -1; }
.scroll { overflow-x: auto; }
.scroll:focus-visible { outline: 2px solid var(--c0); outline-offset: 2px; }
svg.chart { display: block; width: 100%; max-width: 560px; height: auto; font-size: 11px; }
svg.chart text { fill: var(--ink); }
svg.chart .head { font-weight: 600; }
svg.chart .grid { stroke: var(--line); fill: none; }
svg.chart .line { fill: none; stroke-linecap: round; stroke-linejoin: round; }
COLOURS
table { border-collapse: collapse; font-size: .95rem; }
caption { text-align: left; color: var(--soft); font-size: .9rem; padding-bottom: .4rem; }
th, td { padding: .25rem .75rem .25rem 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
th:first-child { text-align: left; font-weight: 500; white-space: pre; }
thead th { font-weight: 600; }
summary { cursor: pointer; }
""".replace(
    "COLOURS",
    "\n".join(
        f"svg.chart .line.c{i} {{ stroke: var(--c{i}); }} svg.chart .part.c{i} {{ fill: var(--c{i}); }}"
        for i in range(COLOURS)
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One framed part of the page; `body` is HTML. One that `is_wide` takes the whole width."""

    title: str
    body: str
    is_wide: bool = False


def page(title: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    """The whole document, plain ASCII, ending in a newline: a heading, paragraphs of text, the sections."""
    framed = "\n".join(
        f'<section class="{"wide" if section.is_wide else "card"}">'
        f"<h2>{plain(section.title)}</h2>\n{section.body}\n</section>"
        for section in sections
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{plain(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{plain(title)}</h1>
{paragraphs(lead)}
<div class="sections">
{framed}
</div>
</main>
</body>
</html>
"""


def paragraphs(texts: Sequence[str], *, is_note: bool = False) -> str:
    """Each text as a paragraph."""
    start = '<p class="note">' if is_note else "<p>"
    return "\n".join(f"{start}{plain(text)}</p>" for text in texts)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str) -> str:
    """A table whose first column names its rows, in a frame of its own that scrolls where it is too wide."""
    head = "".join(f'<th scope="col">{plain(column)}</th>' for column in columns)
    body = "\n".join(
        f'<tr><th scope="row">{plain(row[0])}</th>'
        + "".join(f"<td>{plain(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    inner = (
        f"<table><caption>{plain(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table>"
    )
    return wide(inner, label=caption)


def wide(inner: str, *, label: str) -> str:
    """HTML that may be wider than the screen, in a frame that scrolls, by keyboard too."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label={attribute(label)}>{inner}</div>'
