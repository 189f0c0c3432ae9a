"""What the README says can be run is run, and what it names is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from piper_owner.cli.options import build_parser, read

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = re.findall(r"^(scripts/demo [^#\n]*)", README, flags=re.MULTILINE)


def test_planning_example_prints_the_tied_sync(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [block for block in BLOCKS if "simulate(dag)" in block]
    exec(compile(example, "README.md", "exec"), {})
    grid = capsys.readouterr().out
    for action in ("SEND_GRAD", "OWNER_STEP", "SEND_WEIGHT", "RECV_WEIGHT"):
        assert f"{action}[embed.weight]" in grid


def test_every_example_parses() -> None:
    assert len(BLOCKS) >= 2
    for block in BLOCKS:
        compile(block, "README.md", "exec")


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_the_demo_are_options_of_the_command(command: str) -> None:
    arguments = shlex.split(command)[1:]
    assert read(build_parser().parse_args(["train", *arguments])).config.stages == 4


def test_paths_are_there() -> None:
    named = set(re.findall(r"`((?:piper_owner|scripts|docs|examples|\.ci)/[\w./]*)", README))
    assert "scripts/demo" in named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
