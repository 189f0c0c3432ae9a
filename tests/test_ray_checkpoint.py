"""`piper-owner train --checkpoint`: the run goes on where it stopped, also on other stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from piper_owner.checkpoint import read_index
from piper_owner.errors import CheckpointError
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.results import TrainResult
from piper_owner.runtime.driver import train
from piper_owner.runtime.keeping import Keeping

CONFIG = TrainConfig(
    stages=3,
    microbatches=4,
    microbatch_size=1,
    sequence_length=8,
    vocab=256,
    hidden=8,
    heads=2,
    layers=3,
    steps=6,
    dtype="float64",
    timeout_seconds=30,
)
TOKENS = np.arange(400, dtype=np.int32) ** 2 % 251


def run(config: TrainConfig, keeping: Keeping | None = None) -> TrainResult:
    return train(config, TOKENS, text="numbers", keeping=keeping)


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_goes_on_bit_for_bit_on_the_same_and_on_other_stages(tmp_path: Path) -> None:
    straight = run(CONFIG).runs[RunKind.OWNER]
    half = replace(CONFIG, steps=4)
    run(half, Keeping(path=tmp_path, every=3))
    assert read_index(tmp_path).step == 4
    with pytest.raises(CheckpointError, match="there is a checkpoint already, of step 4"):
        run(half, Keeping(path=tmp_path))
    with pytest.raises(CheckpointError, match=r"these differ: lr \(0.001 there, 0.5 here\)"):
        run(replace(CONFIG, lr=0.5), Keeping(path=tmp_path, resume=True))
    with pytest.raises(CheckpointError, match="behind the last one of --steps 2"):
        run(replace(CONFIG, steps=2), Keeping(path=tmp_path, resume=True))
    other = replace(CONFIG, stages=2, devices=2, steps=5, layout="dense", owner="first")
    longer = run(other, Keeping(path=tmp_path, resume=True)).runs[RunKind.OWNER]
    assert longer.losses == straight.losses[:5]
    result = run(CONFIG, Keeping(path=tmp_path, resume=True))
    assert result.replicas_equal
    ended = result.runs[RunKind.OWNER]
    assert ended.losses == straight.losses
    for rank, weights in straight.weights.items():
        for name, value in weights.items():
            assert np.array_equal(value.numpy(), ended.weights[rank][name].numpy())
    again = run(CONFIG, Keeping(path=tmp_path, resume=True)).runs[RunKind.OWNER]
    assert again.losses == straight.losses  # with nothing left to do
