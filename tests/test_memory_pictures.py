"""The plot and the page of measured memory."""

from __future__ import annotations

import html
import sys
from pathlib import Path

import pytest
from memory_cases import config_of, measured
from tiny import one_torch_thread

from piper_owner.cli import main
from piper_owner.cli.memory_page import memory_page
from piper_owner.cli.memory_plot import draw_plot
from piper_owner.executor.memory_runs import MemoryResult
from piper_owner.planning.config import Method


@pytest.fixture(scope="module")
def result() -> MemoryResult:
    config = config_of("adamw", steps=2, layers=1)
    with one_torch_thread():
        runs = {method: measured(config, method) for method in (Method.ALL_REDUCE, Method.ROWS)}
    return MemoryResult(config=config, where="ray", text="some <text>", runs=runs)


def test_the_page_has_every_figure_and_needs_nothing_else(result: MemoryResult) -> None:
    page = memory_page(result)
    assert page.isascii()
    assert page.startswith("<!DOCTYPE html>")
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")
    words = html.unescape(page)
    for expected in ("What each rank keeps", "Peak of all tensors", "to the byte", "rank 1: difference"):
        assert expected in words
    assert page.count("<table>") == 2
    assert page.count("<svg") == 2
    assert "some &lt;text&gt;" in page


@pytest.mark.parametrize(("ending", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".PDF", b"%PDF")])
def test_a_plot_is_drawn(result: MemoryResult, tmp_path: Path, ending: str, start: bytes) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra named plot")
    file = tmp_path / f"memory{ending}"
    draw_plot(result, file)
    assert file.read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("name", "words"), [("a.png", "pip install 'piper-owner[plot]'"), ("a.txt", "endings .png, .svg, .pdf")]
)
def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_starts(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    assert main(["memory", "--plot", name]) == 2
    assert words in capsys.readouterr().err
