"""What docs/piper.md says about moving a model over works, as it stands there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny import one_torch_thread

from piper_owner.directives import parse_program
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.local import train_in_process
from piper_owner.executor.plan import resolve_run
from piper_owner.executor.results import compare
from piper_owner.executor.stream import token_stream
from piper_owner.frontends.piper import AnnotatedModel

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "piper.md").read_text(encoding="utf-8")
TOKENS = np.random.default_rng(0).integers(0, 256, 2000).astype(np.int32)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def block(language: str) -> str:
    """The only block of the page in `language`."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)
    return str(found)


@pytest.mark.parametrize("devices", [(0, 1), (0, 0)])
def test_the_five_lines_train_as_one_process(
    devices: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tied_model.py").write_text(block("python"))
    text = block("json").replace('"devices": [1]', f'"devices": [{devices[1]}]')
    program = parse_program(text, source="schedule.json")
    config = TrainConfig(
        program=program, vocab=256, steps=3, dtype="float64", microbatch_size=1, sequence_length=4
    )
    (target,) = re.findall(r"--model (\S+)", TEXT)
    source = AnnotatedModel(target=target, folder=str(tmp_path))
    stream = token_stream(resolve_run(config, source), TOKENS)
    result = train_in_process(config, stream, compare=(RunKind.REFERENCE,), source=source)
    differences = compare(result.runs, result.ownership)
    assert differences.loss[RunKind.OWNER] < 1e-10
    assert differences.param[RunKind.OWNER] < 1e-10
    assert result.replicas_equal
    assert result.config.devices == len(set(devices))
    sys.modules.pop("tied_model", None)


def test_links_lead_somewhere() -> None:
    for name in re.findall(r"\]\((?!http)([^)#]+)", TEXT):
        assert (DOCS / name).exists(), name
