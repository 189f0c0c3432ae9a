"""The examples run as the README prints them, stay short, and the README shows what is in them."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
README: Final = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS: Final = re.findall(r"^torchrun .*? examples/.*?(?=\s*(?:#.*)?$)", README, flags=re.MULTILINE)
EXAMPLES: Final = sorted((ROOT / "examples").glob("*.py"))
MARK: Final = "# <-- piper-owner"
MODEL: Final = "annotated"
"""The example that is a model, for the command to train; the others are training loops."""
STEPS: Final = 5
TOLERANCES: Final = {"huggingface": 1e-5}  # in float32; the others train in float64
SECONDS: Final = 180.0


def run(command: str) -> str:
    """What a torchrun command prints, on a port of its own."""
    program, *arguments = shlex.split(command)
    assert program == "torchrun"
    job = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with job:
        try:
            output, errors = job.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            job.terminate()  # torchrun ends its ranks before itself
            raise
    assert job.returncode == 0, output + errors
    return output


def test_readme_gives_the_command_of_every_example() -> None:
    loops = [file for file in EXAMPLES if file.stem != MODEL]
    assert sorted(COMMANDS) == [f"torchrun --nproc-per-node 2 examples/{file.name}" for file in loops]
    assert f"[examples/{MODEL}.py](examples/{MODEL}.py)" in README


@pytest.mark.parametrize("command", COMMANDS)
def test_example_trains_as_one_process(command: str) -> None:
    name = Path(command.split()[-1]).stem
    if name == "huggingface" and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs the hf extra: pip install 'piper-owner[hf]'")
    output = run(command)
    found = re.findall(r"^step (\d): loss ([\d.]+), in one process ([\d.]+)$", output, flags=re.MULTILINE)
    assert [int(step) for step, _, _ in found] == list(range(STEPS)), output
    losses = [float(loss) for _, loss, _ in found]
    assert losses == pytest.approx(
        [float(alone) for _, _, alone in found], rel=0, abs=TOLERANCES.get(name, 1e-10)
    )
    assert len(set(losses)) == STEPS, "it trains"
    assert "every copy bit for bit" in output
    assert re.search(r"^  rank \d owns it", output, flags=re.MULTILINE)
    assert re.search(r"^  rank \d holds a replica", output, flags=re.MULTILINE)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_example_is_short_and_names_its_command(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 60
    is_model = file.stem == MODEL
    command = (
        f"piper-owner train --model examples.{MODEL}:build" if is_model else "torchrun --nproc-per-node 2 "
    )
    assert f"\n{command}" in source
    assert file.name in source or is_model
    unmarked = [line for line in source.splitlines() if "piper_owner" in line and MARK not in line]
    assert unmarked == []
    assert source.isascii()


def test_readme_shows_the_example_and_all_that_it_changes() -> None:
    source = (ROOT / "examples" / "torch_pipelining.py").read_text(encoding="utf-8")
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if MARK in each]
    position = 0
    for paragraph in block.strip().split("\n\n"):
        excerpts = [paragraph, textwrap.indent(paragraph, "    ")]
        places = [place for place in (source.find(f"\n{each}\n") for each in excerpts) if place >= position]
        assert places, f"not in the example, or not in this order:\n{paragraph}"
        position = places[0]
    marked = [[line.strip() for line in text.splitlines() if MARK in line] for text in (block, source)]
    assert marked[0] == marked[1]
