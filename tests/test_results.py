"""Results of runs: how they are put together, compared and written as JSON."""

from __future__ import annotations

import json
import math

import pytest
import torch

from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.results import RunResult, TrainResult, collect_run, compare
from piper_owner.executor.session import RankReport, StepReport
from piper_owner.ownership import OwnershipPlan, ParameterUse, plan_ownership
from piper_owner.transport.messages import BytesSent

CONFIG = TrainConfig(stages=2, devices=2, microbatches=2, microbatch_size=1, sequence_length=5)


def ownership() -> OwnershipPlan:
    uses = [
        ParameterUse(name="embed.weight", rank=0, stage=0, shape=(2,), dtype="float32"),
        ParameterUse(name="head.weight", rank=1, stage=1, shape=(2,), dtype="float32"),
    ]
    return plan_ownership([("embed.weight", "head.weight")], uses, world_size=2)


def step(first: float, second: float, seconds: float) -> dict[int, StepReport]:
    return {
        0: StepReport(loss=first, seconds=seconds, bytes_sent=BytesSent(weights=8)),
        1: StepReport(loss=second, seconds=seconds / 2, bytes_sent=BytesSent(grads=8, other=3)),
    }


def made(kind: RunKind, loss: float, weights: dict[int, dict[str, torch.Tensor]]) -> RunResult:
    reports = {rank: RankReport(tied_weights=8, tied_grads=8, tied_optimizer=16) for rank in weights}
    return collect_run(
        CONFIG, kind, [{rank: step(0.0, loss, 1.0)[rank] for rank in weights}], reports, weights
    )


def test_run_is_collected_from_its_ranks() -> None:
    reports = {
        0: RankReport(tied_weights=8, tied_grads=4, tied_optimizer=16, optimizer_state=160),
        1: RankReport(tied_weights=8, tied_grads=8, tied_optimizer=0, optimizer_state=70),
    }
    steps = [step(0.0, 3.0, 9.0), step(0.5, 2.0, 0.1), step(0.25, 1.0, 0.2)]
    run = collect_run(CONFIG, RunKind.OWNER, steps, reports, {0: {}, 1: {}})
    assert run.losses == (3.0, 2.5, 1.25)
    assert run.seconds_per_step == 0.2
    assert run.tokens_per_second == pytest.approx(50)
    written = run.to_dict()
    assert written["bytes_sent_per_step"] == {
        "0": {"ids": 0, "rows": 0, "grads": 0, "weights": 8, "other": 0},
        "1": {"ids": 0, "rows": 0, "grads": 8, "weights": 0, "other": 3},
    }
    assert written["tied_bytes"] == {
        "0": {"weights": 8, "grads": 4, "optimizer": 16},
        "1": {"weights": 8, "grads": 8, "optimizer": 0},
    }
    assert written["optimizer_state_bytes"] == {"0": 160, "1": 70}


def test_idle_ranks_of_the_reference_are_listed_with_zeros() -> None:
    run = made(RunKind.REFERENCE, 1.0, {0: {}})
    assert run.to_dict()["tied_bytes"]["1"] == {"weights": 0, "grads": 0, "optimizer": 0}
    assert run.to_dict()["optimizer_state_bytes"]["1"] == 0
    assert set(run.to_dict()["bytes_sent_per_step"]) == {"0", "1"}


def test_worst_copy_counts_and_the_head_meets_the_embedding() -> None:
    one = torch.tensor([1.0, 2.0])
    runs = {
        RunKind.OWNER: made(RunKind.OWNER, 2.0, {0: {"embed.weight": one}, 1: {"head.weight": one}}),
        RunKind.REFERENCE: made(RunKind.REFERENCE, 0.0, {0: {"embed.weight": one}}),
        RunKind.NAIVE: made(
            RunKind.NAIVE, 2.5, {0: {"embed.weight": one}, 1: {"head.weight": one - torch.tensor([0, 0.25])}}
        ),
    }
    found = compare(runs, ownership())
    assert found.param == {RunKind.OWNER: 0.0, RunKind.NAIVE: 0.25}
    assert found.loss == {RunKind.OWNER: 2.0, RunKind.NAIVE: 2.5}


def test_differences_of_low_precision_do_not_vanish() -> None:
    low = torch.tensor([1.0], dtype=torch.bfloat16)
    runs = {
        RunKind.OWNER: made(RunKind.OWNER, 0.0, {0: {"w": low + 2**-7}}),
        RunKind.REFERENCE: made(RunKind.REFERENCE, 0.0, {0: {"w": low}}),
    }
    assert compare(runs, ownership()).param[RunKind.OWNER] == 2**-7


def test_without_a_reference_nothing_is_compared() -> None:
    runs = {RunKind.OWNER: made(RunKind.OWNER, 0.0, {0: {"w": torch.zeros(1)}})}
    assert compare(runs, ownership()).loss == {}
    assert compare(runs, ownership()).param == {}


def test_parameter_unknown_to_the_reference_is_an_error() -> None:
    runs = {
        RunKind.OWNER: made(RunKind.OWNER, 0.0, {0: {"extra": torch.zeros(1)}}),
        RunKind.REFERENCE: made(RunKind.REFERENCE, 0.0, {0: {"w": torch.zeros(1)}}),
    }
    with pytest.raises(ValueError, match="'extra'"):
        compare(runs, ownership())


@pytest.mark.parametrize("values", [[1.0, math.nan], [math.nan, 1.0]])
def test_not_a_number_is_the_worst_difference_and_valid_json(values: list[float]) -> None:
    weights = {0: {"w": torch.tensor(values)}}
    runs = {
        RunKind.OWNER: made(
            RunKind.OWNER, 0.0, {rank: {"w": torch.tensor([v])} for rank, v in enumerate(values)}
        ),
        RunKind.REFERENCE: made(RunKind.REFERENCE, math.nan, {0: {"w": torch.zeros(1)}, 1: {}}),
    }
    assert math.isnan(compare(runs, ownership()).param[RunKind.OWNER])
    assert math.isnan(compare(runs, ownership()).loss[RunKind.OWNER])
    result = TrainResult(config=CONFIG, text="numbers", ownership=ownership(), runs=runs, replicas_equal=True)
    written = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert written["max_abs_param_diff"] == {"owner": None}
    assert written["runs"]["reference"]["losses"] == [None]
    assert weights[0]["w"].isnan().any()
