"""Annotated models under schedule programs, against one process: in threads, and by the command on Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tiny import one_torch_thread

from piper_owner.cli import main
from piper_owner.directives import Program, emit_program, format_program, parse_program
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.local import train_in_process
from piper_owner.executor.plan import plan_run, resolve_run
from piper_owner.executor.results import TrainResult, compare
from piper_owner.executor.source import GPTSource
from piper_owner.executor.stream import token_stream
from piper_owner.frontends.piper.source import AnnotatedModel
from piper_owner.schedules import Schedule

TESTS: Final = str(Path(__file__).parent)
TOKENS: Final = np.random.default_rng(0).integers(0, 256, 2000).astype(np.int32)
TWO: Final = AnnotatedModel(target="annotated_models:TwoRegions", folder=TESTS)
FOUR: Final = AnnotatedModel(target="annotated_models:FourRegions", folder=TESTS)
SCHEDULES: Final = [schedule.value for schedule in Schedule]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


Directives = list[dict[str, Any]]


def place(region: int, *devices: int) -> dict[str, Any]:
    return {"op": "place", "filter": {"PP": region}, "devices": list(devices), "stream": "pp"}


def split(microbatches: int = 2) -> dict[str, Any]:
    return {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": microbatches}


def directives_of(placement: Sequence[int], *more: dict[str, Any]) -> Directives:
    """A program of Piper's kind: a place for each region, a split, and `more`."""
    return [*(place(region, device) for region, device in enumerate(placement)), split(), *more]


def order(*texts: str) -> dict[str, Any]:
    """`order("0F0", "0B0,1B0")`: groups of computes, by region, pass and microbatch."""
    groups = [
        [{"PP": int(each[0]), "MB": each[2:], "PASS": each[1]} for each in text.split(",")] for text in texts
    ]
    return {"op": "order", "filters": groups}


ON_ONE: Final = directives_of((0, 0), order("0F0", "1F0", "0F1", "1F1", "1B0", "0B0", "1B1,0B1"))
ON_TWO: Final = directives_of((0, 1), order("0F0", "0F1", "0B0", "0B1"), order("1F0", "1B0", "1F1", "1B1"))

REPLICATED: Final = [{"op": "replicate", "filter": {"PP": pp}, "devices": [pp, pp + 2]} for pp in (0, 1)]


def config_of(program: Program | None = None, **changes: Any) -> TrainConfig:  # noqa: ANN401 - fields of a config
    small: dict[str, Any] = {
        "microbatch_size": 1, "sequence_length": 4, "vocab": 256, "steps": 3, "dtype": "float64",
        "program": program, "timeout_seconds": 20,
    }  # fmt: skip
    return TrainConfig(**{**small, **changes})


def parsed(directives: object) -> Program:
    return parse_program(json.dumps(directives), source="schedule.json")


def train(config: TrainConfig, source: AnnotatedModel) -> TrainResult:
    resolved = resolve_run(config, source)
    stream = token_stream(resolved, TOKENS)
    result = train_in_process(config, stream, compare=(RunKind.REFERENCE,), source=source)
    differences = compare(result.runs, result.ownership)
    assert differences.loss[RunKind.OWNER] <= 1e-10
    assert differences.param[RunKind.OWNER] <= 1e-10
    assert result.replicas_equal
    return result


@pytest.mark.parametrize(("directives", "devices"), [(ON_ONE, 1), (ON_TWO, 2)])
@pytest.mark.parametrize("layout", ["auto", "dense"])
def test_two_regions_on_one_device_and_on_two(directives: object, devices: int, layout: str) -> None:
    result = train(config_of(parsed(directives), layout=layout), TWO)
    assert (result.config.devices, result.config.microbatches, result.config.stages) == (devices, 2, 2)
    sent = result.runs[RunKind.OWNER].bytes_sent_per_step.values()
    assert (sum(each.total for each in sent) == 0) is (devices == 1)
    assert sum(tied.optimizer > 0 for tied in result.runs[RunKind.OWNER].tied_bytes.values()) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("placement", "devices"), [("v", 2), ("loop", 4), ("loop", 2)])
def test_four_regions_under_every_schedule(schedule: str, placement: str, devices: int) -> None:
    config = config_of(schedule=schedule, placement=placement, devices=devices, microbatches=4)
    result = train(config, FOUR)
    if placement == "v":
        assert all(sent.total == 0 for sent in result.runs[RunKind.OWNER].bytes_sent_per_step.values())
    # The same as a program, which a user may edit.
    built = plan_run(config, RunKind.OWNER, FOUR).dag
    program = parse_program(format_program(emit_program(built)), source="emitted")
    again = plan_run(config_of(program), RunKind.OWNER, FOUR)
    assert again.dag == built
    assert (again.config.devices, again.config.microbatches) == (devices, 4)


@pytest.mark.parametrize("scope", ["pipeline", "global"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_regions_in_two_pipelines(scope: str, schedule: str) -> None:
    config = config_of(schedule=schedule, placement="v", devices=2, microbatches=4, dp=2, scope=scope)
    result = train(config, FOUR)
    owned = [tied.optimizer > 0 for tied in result.runs[RunKind.OWNER].tied_bytes.values()]
    assert sum(owned) == (1 if scope == "global" else 2)


@pytest.mark.parametrize("scope", ["pipeline", "global"])
def test_replicate_makes_pipelines(scope: str) -> None:
    result = train(config_of(parsed([*ON_TWO, *REPLICATED]), scope=scope), TWO)
    assert (result.config.dp, result.config.devices, result.config.num_ranks) == (2, 2, 4)
    assert sorted(result.runs[RunKind.OWNER].tied_bytes) == [0, 1, 2, 3]


def test_the_gpt_has_as_many_stages_as_its_program_places() -> None:
    config = resolve_run(config_of(parsed(directives_of((0, 1, 0)))), GPTSource())
    assert (config.stages, config.devices, config.microbatches) == (3, 2, 2)
    assert resolve_run(config, GPTSource()) == config
    everywhere = [{"op": "place", "filter": {}, "device": 0}]
    assert resolve_run(config_of(parsed(everywhere), stages=3), GPTSource()).stages == 3


# -- by the command

CROSSWISE: Final = (order("0F0", "0F1"), order("1F1", "1F0"), order("1B0", "1B1"), order("0B1", "0B0"))
BAD: Final[dict[str, tuple[object, str]]] = {
    "no array": ({}, "schedule.json"),
    "order against data": (directives_of((0, 1), order("0B0", "0F0")), "directive[3]"),
    "a region twice": ([*ON_TWO, place(1, 0)], "directive[5]"),
    "an unknown tag": ([{"op": "place", "filter": {"EP": 0}, "device": 0}], "directive[0]"),
    "split twice": ([*ON_TWO, split(4)], "directive[5]"),
    "crosswise": (directives_of((0, 1), *CROSSWISE), "directive[3]"),
    "ZeRO": (
        [*ON_TWO, {"op": "replicate", "filter": {}, "devices": [0, 1], "shard_grads": True}],
        "directive[5]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_program_ends_with_2_before_anything_starts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directives, quoted = BAD[name]
    monkeypatch.chdir(TESTS)
    file = tmp_path / "schedule.json"
    file.write_text(json.dumps(directives))
    status = main(["train", "--model", "annotated_models:TwoRegions", "--directives", str(file)])
    said = capsys.readouterr().err
    assert status == 2, said
    assert said.startswith("piper-owner: error: ")
    assert quoted in said
    assert "Traceback" not in said


def test_files_that_are_no_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    unread = "cannot read it"
    for path, words in (
        (binary, "byte 0 is no UTF-8 text; this is no schedule program"),
        (tmp_path / "none", unread),
        (tmp_path, unread),
    ):
        assert main(["train", "--directives", str(path)]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("directives", "devices", "pipelines"), [(ON_ONE, 1, 1), (ON_TWO, 2, 1), ([*ON_TWO, *REPLICATED], 2, 2)]
)
def test_the_command_runs_a_model_and_a_program(
    directives: object, devices: int, pipelines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(TESTS)
    schedule, figures = tmp_path / "schedule.json", tmp_path / "out.json"
    schedule.write_text(json.dumps(directives))
    arguments = (
        *("--model", "annotated_models:TwoRegions", "--directives", str(schedule), "--text", __file__),
        *("--steps", "3", "--dtype", "float64", "--vocab", "256", "--sequence-length", "4"),
        *("--compare", "reference", "--json", str(figures)),
    )
    assert main(["train", *arguments]) == 0
    written = json.loads(figures.read_text())
    assert (written["config"]["devices"], written["config"]["dp"]) == (devices, pipelines)
    assert written["config"]["directives"] == str(schedule)
    assert written["max_abs_loss_diff"]["owner"] < 1e-10
    assert written["max_abs_param_diff"]["owner"] < 1e-10
    assert written["replicas_equal"] is True
    sent = written["runs"]["owner"]["bytes_sent_per_step"].values()
    assert (sum(sum(kinds.values()) for kinds in sent) == 0) is (devices == 1)
