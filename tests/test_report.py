"""The page of a run: well formed, whole, alone, and looked at in a browser where there is one."""

from __future__ import annotations

import math
import re
import shutil
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from ray_jobs import SMALL
from tiny import one_torch_thread
from traces import recorded_run, small

from piper_owner.cli import main
from piper_owner.cli.report import timeline_section, train_page
from piper_owner.dag.nodes import parse_action
from piper_owner.drawing.charts import Bar, BarGroup, Curve, curves, stacked_bars
from piper_owner.drawing.page import Section, page, table
from piper_owner.drawing.timeline import Arrow, Look, draw
from piper_owner.executor.config import RunKind
from piper_owner.executor.plan import plan_run
from piper_owner.executor.results import TrainResult
from piper_owner.executor.source import GPTSource
from piper_owner.simulate import Timeline, simulate
from piper_owner.tracing.events import trace_of

ROOT = Path(__file__).resolve().parent.parent
VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})
BROWSER = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
COMPARED = (RunKind.REFERENCE, RunKind.NAIVE, RunKind.ALLREDUCE)


class Balance(HTMLParser):
    """Fails on a tag that does not close; keeps the tags, attributes and words."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def read(text: str) -> Balance:
    """Parse a page, and check what every page keeps."""
    assert text.isascii()
    assert text.startswith("<!DOCTYPE html>")
    found = Balance()
    found.feed(text)
    found.close()
    assert found.open == []
    assert len(found.of("title")) > len(found.of("svg")), "the page and each drawing have a title"
    assert len(found.of("h1")) == 1
    assert found.of("html") == [{"lang": "en"}]
    for forbidden in ("script", "iframe", "object", "embed", "img"):
        assert found.of(forbidden) == []
    for tag, attributes in found.tags:
        assert attributes.get("src") is None, tag
        assert attributes.get("href") in (None, "data:,"), tag
    assert not re.search(r"@import|url\(", text)
    for drawing in found.of("svg"):
        assert drawing["role"] == "img"
    for cell in found.of("th"):
        assert cell["scope"] in ("col", "row")
    assert len(found.of("caption")) == len(found.of("table"))
    for drawing in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        root = ET.fromstring(drawing)
        first = root[0]
        assert first.tag.endswith("title")
        assert first.text
    assert "prefers-color-scheme: dark" in text
    return found


@pytest.fixture(scope="module")
def result() -> Iterator[TrainResult]:
    with one_torch_thread():
        yield recorded_run(small(steps=6, layout="dense"), first_step=4, compare=COMPARED)


@pytest.fixture(scope="module")
def written(result: TrainResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(train_page(result), encoding="ascii")
    return file


def test_the_page_has_every_run(result: TrainResult, written: Path) -> None:
    found = read(written.read_text())
    words = " ".join(found.words)
    for kind in (RunKind.OWNER, *COMPARED):
        assert kind.value in words
        for loss in result.runs[kind].losses:
            assert f"{loss:.6g}" in words
    assert [f"c{place}" for place in range(4)] == sorted(
        {str(path["class"]).split()[-1] for path in found.of("path") if "line" in str(path.get("class"))}
    )
    assert "Timeline of step 6" in words
    for rank in range(4):
        assert f"rank {rank}" in words
    assert {"of ties", "of the rest"} <= set(found.words)
    for name in ("0F0", "3B3", "OWNER_STEP[embed.weight]", "RECV_WEIGHT[embed.weight]<-0"):
        assert name in found.words
    assert parse_action("0F0")
    assert "optimizer state of tie" in found.words
    assert "naive does NOT train like the reference" in words


def test_the_page_without_a_record_has_no_timeline(result: TrainResult) -> None:
    from dataclasses import replace

    assert "Timeline" not in train_page(replace(result, records=()))


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome here")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_page_without_errors(written: Path, width: int, tmp_path: Path) -> None:
    assert BROWSER is not None
    picture = tmp_path / "picture.png"
    size = f"--window-size={width},1900"
    # What is wider than the window would make the page as wide; the picture tells.
    probe = tmp_path / "probe.html"
    marker = "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script>"
    probe.write_text(written.read_text().replace("</body>", f"{marker}</body>"), encoding="ascii")
    common = (BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}")
    shoot = ("--hide-scrollbars", "--enable-logging=stderr", size, f"--screenshot={picture}")
    shown = subprocess.run(
        [*common, *shoot, written.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in shown.stderr, shown.stderr
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (width, 1900)
    # Every pixel of one colour would be a blank page, of a few bytes.
    assert picture.stat().st_size > 20_000
    dumped = subprocess.run(
        [*common, "--hide-scrollbars", size, "--dump-dom", probe.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r"<title>(\d+) of (\d+)</title>", dumped.stdout)
    assert found is not None
    assert int(found[1]) <= int(found[2]), "nothing makes the page wider than the window"


def test_what_is_in_a_page_is_text_not_markup() -> None:
    evil = '<script>"a" & b</script> \N{GREEK SMALL LETTER ALPHA}'
    chart = curves([Curve(name=evil, values=(1.0, math.nan, 3.0))], title=evil, across=evil, up=evil)
    bars = [BarGroup(name=evil, bars=(Bar(label=evil, parts={evil: 1.0}),))]
    sections = [
        Section(title=evil, body=chart),
        Section(title=evil, body=stacked_bars(bars, title=evil, format_value=str)),
        Section(title=evil, body=table([evil], [[evil]], caption=evil)),
    ]
    found = read(page(evil, [evil], sections))
    assert found.words.count(evil) > 8


def test_curves_of_nothing_of_one_value_and_of_no_finite_value() -> None:
    for lines in ([], [Curve(name="a", values=(2.0,))], [Curve(name="a", values=(math.inf, math.nan))]):
        chart = ET.fromstring(curves(lines, title="loss", across="step", up="loss"))
        for number in re.findall(r"-?[\d.]+|nan|inf", " ".join(e.get("d", "") for e in chart.iter())):
            assert math.isfinite(float(number))
    split = curves([Curve(name="a", values=(1.0, 2.0, math.nan, 3.0, 4.0))], title="", across="", up="")
    assert split.count('class="line c0" d="M') == 1 + 2, "the legend, and a piece on either side"


def test_bars_are_to_scale_and_many_are_cut() -> None:
    bars = tuple(Bar(label=f"rank {rank}", parts={"a": 10.0 * rank, "b": 5.0}) for rank in range(100))
    drawn = ET.fromstring(
        stacked_bars([BarGroup(name="run", bars=bars)], title="t", format_value=lambda v: f"{v:g} B")
    )
    parts = [e for e in drawn.iter() if e.get("class") == "part c0" and float(e.get("x", "0")) > 12]
    wide = [float(part.get("width", "0")) for part in parts]
    assert wide[9] / wide[0] == pytest.approx(10, abs=0.1)
    assert any(e.text == "and 36 more" for e in drawn.iter())


def test_a_timeline_in_milliseconds_has_round_ticks_and_arrows() -> None:
    timeline = Timeline(
        programs=((parse_action("0F0"),), (parse_action("1F0"),)),
        starts=((0.0,), (0.01,)),
        ends=((0.01,), (0.0234,)),
        busy=(0.01, 0.0134),
    )
    arrow = Arrow(source=0, sent=0.01, target=1, received=0.0234, label="a message")
    look = Look(width=600, unit="ms", scale=1000.0, paper=None, ink="currentColor", has_title=False)
    drawn = ET.fromstring(draw(timeline, title="t", num_microbatches=1, arrows=[arrow], look=look))
    texts = [e.text for e in drawn.iter() if e.text]
    assert [text for text in texts if re.fullmatch(r"[\d.]+( ms)?", text)] == ["0 ms", "5", "10", "15", "20"]
    assert "a message" in texts
    assert len([e for e in drawn.iter() if e.tag.endswith("polygon")]) == 1


def test_a_predicted_timeline_shows_the_messages_of_ties() -> None:
    dag = plan_run(small(layout="dense"), RunKind.OWNER, GPTSource()).dag
    trace = trace_of(simulate(dag), title="a plan")
    body = timeline_section(trace, num_microbatches=4).body
    assert "<title>SEND_GRAD[embed.weight]-&gt;0</title>\n<path" in body
    assert "<title>SEND_WEIGHT[embed.weight]-&gt;3</title>\n<path" in body


def test_the_picture_in_the_docs_is_that_of_the_script_and_hides_the_sync() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "draw_step.py"), "--output", "-"]
    printed = subprocess.run(script, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60)
    assert (ROOT / "docs" / "step.svg").read_text() == printed.stdout
    title = ET.fromstring(printed.stdout)[0].text or ""
    found = re.search(r": ([\d.]+) a step, and ([\d.]+) if", title)
    assert found is not None
    assert found[1] == found[2], "the sync costs nothing"
    assert "docs/step.svg" in (ROOT / "README.md").read_text()


@pytest.mark.usefixtures("ray_cluster")
def test_the_command_writes_a_report(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    arguments = (*SMALL, "--steps", "2", "--text", __file__, "--report", str(file))
    assert main(["train", *arguments]) == 0
    words = " ".join(read(file.read_text()).words)
    assert "Timeline of step 2" in words
    assert __file__ in words
