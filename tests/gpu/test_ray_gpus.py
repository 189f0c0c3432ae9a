"""The Ray backend on GPUs: equal to the reference under each schedule and layout; a killed rank.

Each body runs on the CPU with --gpu-device cpu.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gpu_marker import device_of
from ray import cloudpickle
from test_ray_faults import KillsItself

from piper_owner.errors import RunError
from piper_owner.executor.config import DTYPES, SCHEDULES, RunKind, TrainConfig
from piper_owner.executor.session import StepReport
from piper_owner.ownership import LayoutChoice
from piper_owner.runtime.actor import RankHost
from piper_owner.runtime.driver import train

# Actors cannot import a test module, so the class below travels as it is.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

CONFIG = TrainConfig(
    stages=2,
    microbatches=4,
    microbatch_size=2,
    sequence_length=8,
    vocab=256,
    hidden=16,
    heads=2,
    layers=4,
    steps=4,
    dtype="float64",
    timeout_seconds=60,
)
TOKENS = np.random.default_rng(0).integers(0, 256, 1000).astype(np.int32)
LAYOUTS: tuple[LayoutChoice, ...] = ("rows", "dense")
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.3}
"""Of losses of about 5.5. AdamW in bfloat16 keeps no masters here, and moves weights by their last bits."""

pytestmark = pytest.mark.usefixtures("ray_cluster")


def on(config: TrainConfig, pytestconfig: pytest.Config, **changes: object) -> TrainConfig:
    return replace(config, device=device_of(pytestconfig), **changes)  # type: ignore[arg-type]


def check(config: TrainConfig) -> None:
    result = train(config, TOKENS, text="numbers", compare=[RunKind.REFERENCE])
    written = result.to_json()
    assert written["replicas_equal"] is True
    assert written["max_abs_loss_diff"]["owner"] < TOLERANCES[config.dtype]
    if config.dtype == "float64":
        assert written["max_abs_param_diff"]["owner"] < TOLERANCES[config.dtype]
    state = [tied["optimizer"] > 0 for tied in written["runs"]["owner"]["tied_bytes"].values()]
    assert state.count(True) == config.dp


@pytest.mark.gpu(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_share_one(pytestconfig: pytest.Config, layout: LayoutChoice) -> None:
    check(on(CONFIG, pytestconfig, layout=layout, gpus_per_rank=0.5))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_first_and_last_stage_on_one(pytestconfig: pytest.Config, schedule: str) -> None:
    check(on(CONFIG, pytestconfig, schedule=schedule, placement="v", stages=2, devices=1))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_on_two(pytestconfig: pytest.Config, schedule: str, layout: LayoutChoice) -> None:
    check(on(CONFIG, pytestconfig, schedule=schedule, layout=layout, stages=4, devices=2))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_on_two(pytestconfig: pytest.Config, dtype: str) -> None:
    check(on(CONFIG, pytestconfig, dtype=dtype, clip=1.0))


@pytest.mark.gpu(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_pipelines_of_two(pytestconfig: pytest.Config, layout: LayoutChoice) -> None:
    check(on(CONFIG, pytestconfig, dp=2, layout=layout))


@pytest.mark.gpu(4)
def test_four_in_a_row(pytestconfig: pytest.Config) -> None:
    check(on(CONFIG, pytestconfig, stages=4, devices=4))


class SaysWhereItIs(RankHost):
    """Fails in its first step with its device and the settings of NCCL that it finds."""

    def step(self, index: int) -> StepReport:
        settings = {name: value for name, value in os.environ.items() if name.startswith("NCCL")}
        folder = Path(self._stream_folder)
        (folder / f"rank{self.rank}").write_text(
            json.dumps([str(self._device()), os.environ.get("CUDA_VISIBLE_DEVICES"), settings])
        )
        return super().step(index)

    @property
    def _stream_folder(self) -> str:
        return self.config.model.partition("@")[2]


@pytest.mark.gpu(2)
def test_each_actor_sees_its_own_and_the_settings_of_nccl_as_they_are(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    config = on(CONFIG, pytestconfig, steps=1, model=f"gpt@{tmp_path}")
    train(config, TOKENS, text="numbers", host_class=SaysWhereItIs)
    said = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert [settings for _, _, settings in said] == [
        {name: value for name, value in os.environ.items() if name.startswith("NCCL")}
    ] * 2
    if config.device == "cuda":
        assert [device for device, _, _ in said] == ["cuda:0"] * 2
        assert len({shown for _, shown, _ in said}) == 2
    else:
        assert [device for device, _, _ in said] == ["cpu"] * 2


@pytest.mark.gpu(2)
def test_a_killed_rank_ends_the_run(pytestconfig: pytest.Config) -> None:
    config = on(CONFIG, pytestconfig, timeout_seconds=30)
    with pytest.raises(RunError, match=r"step \d of the owner run: rank 1 died"):
        train(config, TOKENS, text="numbers", host_class=KillsItself)
