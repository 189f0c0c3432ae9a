"""Measured bytes by kind, on what is there, and against what was predicted from shapes and a plan."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from memory_cases import (
    CASES,
    METHODS,
    beside_prediction,
    config_of,
    measured,
    measured_rank,
    measured_steps,
    source_of,
)
from ranks import RankPool
from torch import nn

import piper_owner as po
from piper_owner.assignment import assign_over
from piper_owner.errors import ConfigError
from piper_owner.executor.local import run_threads
from piper_owner.memory import KINDS, MemoryUse, TensorTracker, measure, predict, process_memory
from piper_owner.ownership import OwnershipPlan
from piper_owner.planning.config import Method
from piper_owner.transport import Fabric

SAMPLE = {
    ("adamw", Method.ROWS),
    ("adam", Method.ALL_REDUCE),
    ("sgd", Method.DENSE),
    ("adafactor", Method.ROWS),
}
MATRIX = [
    pytest.param(name, method, marks=() if (name, method) in SAMPLE else pytest.mark.slow)
    for name in CASES
    for method in METHODS
]


@pytest.mark.parametrize(("name", "method"), MATRIX)
def test_a_run_keeps_what_was_predicted(name: str, method: Method, rank_pool: RankPool) -> None:
    config = config_of(name)
    config = source_of(config).resolve(config)
    # The first operator that a rank tracks imports much of torch, on all ranks at once.
    wait = timedelta(seconds=60)
    steps = rank_pool.run_within(config.num_ranks, measured_rank, (config, method), timeout=wait, limit=180.0)
    run = beside_prediction(config, method, steps)
    for rank, found in enumerate(run.ranks):
        difference = found.difference
        wrong = {kind: difference[kind] for kind in KINDS if kind != "staging" and difference[kind]}
        assert wrong == {}, (rank, found.to_dict())
        assert found.peak_error < 0.1, (rank, found.to_dict())
        assert found.later.peak > found.later.use.weights + found.later.use.optimizer
    assert sum(found.later.use.optimizer for found in run.ranks) > 0
    assert (method is Method.ROWS) == any(found.later.use.rows for found in run.ranks)


def test_another_dtype() -> None:
    assert all(found.is_exact for found in measured(config_of("adamw", dtype="bfloat16"), Method.DENSE).ranks)


def test_a_replica_without_a_copy_lets_go_of_the_gradients_that_it_sent() -> None:
    steps = measured_steps(config_of("adamw", steps=8), Method.ROWS)
    for rank in range(2):
        early, late = (steps[rank][step].use.total for step in (1, -1))
        assert late < 1.1 * early, "what is held does not grow from step to step"


def test_the_v_placement_keeps_one_parameter() -> None:
    config = config_of("adam", placement="v", schedule="1f1b", devices=2)
    dense, naive = (measured(config, method).ranks[0] for method in (Method.DENSE, Method.NAIVE))
    assert dense.is_exact
    assert naive.is_exact
    assert naive.later.use.weights - dense.later.use.weights == 2000 * 24 * 4
    assert dense.later.use.staging == 0


# -- the public functions, in a loop of one's own


def _parts(rank: int) -> nn.ModuleDict:
    torch.manual_seed(0)
    embed, head = nn.Embedding(40, 8), nn.Linear(8, 40, bias=False)
    head.weight = embed.weight
    return nn.ModuleDict({"embed": embed, "hidden": nn.Linear(8, 8)} if rank == 0 else {"head": head})


def _own_loop(fabric: Fabric) -> list[MemoryUse]:
    module = _parts(fabric.rank).bfloat16()
    ids = torch.arange(6)
    own = assign_over(fabric, module, [("embed.weight", "head.weight")], layout="rows")
    opt = po.OwnerOptimizer(
        module.parameters(), torch.optim.AdamW, ownership=own, lr=0.1, master_dtype=torch.float32
    )
    made = measure(module, opt)
    for _ in range(2):
        opt.prefetch(ids if fabric.rank == 0 else None)
        if fabric.rank == 0:
            module["hidden"](module["embed"](ids)).sum().backward()
        else:
            module["head"](torch.ones(6, 8, dtype=torch.bfloat16)).sum().backward()
        before = measure(module, opt)
        opt.step()
        opt.zero_grad()
    foreseen = predict([module], own.plan, fabric.rank, master_dtype=torch.float32, num_rows=6)
    own.close()
    return [made, before, measure(module, opt), foreseen]


def test_a_loop_of_ones_own_with_masters_and_rows() -> None:
    ranks = run_threads(2, _own_loop, timeout=timedelta(seconds=60))
    # Rank 0: hidden, 8 x 8 and 8, and a table of 64 rows of 8; rank 1 steps the table of 40 rows of 8.
    for (made, before, after, foreseen), stepped, rows in zip(ranks, (72, 320), (64 * 8, 0), strict=True):
        assert made.weights == before.weights == after.weights == foreseen.weights == 2 * stepped
        assert made.masters == before.masters == foreseen.masters == 4 * stepped
        assert made.gradients == after.gradients == 0
        assert before.gradients == foreseen.gradients == 2 * (stepped + rows)
        tensors = 2 if rows else 1
        assert made.optimizer == 0
        assert after.optimizer == foreseen.optimizer == 8 * stepped + 4 * tensors
        assert before.rows == foreseen.rows == 2 * rows


def test_a_storage_counts_once_under_the_first_kind_that_has_it() -> None:
    linear = nn.Linear(4, 4, bias=False)
    model, weight = nn.Sequential(linear, nn.BatchNorm1d(4)), nn.Parameter(torch.zeros(4, 4))
    linear.weight = weight
    model.register_parameter("again", weight)
    with torch.device("meta"):
        model.append(nn.Linear(1000, 1000))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[weight]["view"] = weight.detach()[:2]
    optimizer.state[weight]["momentum_buffer"] = torch.zeros(10)[:3]
    use = measure(model, optimizer, other=[torch.zeros(5), weight])
    assert use.to_dict() == {
        **dict.fromkeys(KINDS, 0),
        "weights": 4 * (16 + 4 + 4),
        "optimizer": 4 * 10,  # the storage, not the view
        "other": 4 * (4 + 4) + 8 + 4 * 5,
        "total": 4 * 24 + 40 + 40 + 20,
    }


def test_a_sparse_gradient_counts_its_indices_and_values() -> None:
    embed = nn.Embedding(100, 4, sparse=True)
    embed(torch.tensor([3, 5])).sum().backward()
    assert measure(embed).gradients == 2 * 8 + 2 * 4 * 4


def test_sums_and_largest_of_two() -> None:
    one, two = MemoryUse(weights=3, rows=1), MemoryUse(weights=2, other=7)
    assert one + two == MemoryUse(weights=5, rows=1, other=7)
    assert one | two == MemoryUse(weights=3, rows=1, other=7)
    assert (one | two).total == 11


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizer": "lion"}, "optimizer='lion'"),
        ({"master_dtype": torch.int64}, "dtype int64"),
    ],
)
def test_what_cannot_be_predicted_is_said(arguments: dict[str, object], words: str) -> None:
    plan = OwnershipPlan(world_size=1, ties=())
    with pytest.raises(ConfigError, match=words):
        predict(nn.Linear(2, 2), plan, 0, **arguments)  # type: ignore[arg-type]


def test_frozen_parameters_have_weights_alone() -> None:
    model = nn.Linear(3, 2).requires_grad_(False)
    assert predict(model, OwnershipPlan(world_size=1, ties=()), 0) == MemoryUse(weights=4 * 8)


def test_the_tracker_sees_what_is_alive_at_once() -> None:
    kept = torch.zeros(100)
    with TensorTracker([kept, kept[:3]]) as tracker:
        assert tracker.live == 400
        a = torch.zeros(50)
        b = a.view(5, 10) * 2
        assert tracker.live == 800
        del b
        assert tracker.live == 600
        c = a.requires_grad_().exp().sum()  # keeps the result of exp for the backward
        assert tracker.live == 600 + 200 + 4
        c.backward()
        del c
        assert a.grad is not None
    assert tracker.live == 600 + 200
    assert 800 + 204 <= tracker.peak <= 1300
    del kept
    assert tracker.live == 400
    tracker.reset_peak()
    assert tracker.peak == 400


def test_the_process_has_a_resident_set() -> None:
    found = process_memory()
    assert found.resident is None or found.resident > 10**7
    assert po.memory.process_memory is process_memory
    assert (found.allocated is None) == (found.peak is None) == (found.reserved is None)
