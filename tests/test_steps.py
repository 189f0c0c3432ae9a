"""Ranks that drift apart in steps: every sum over ranks carries its step, and all of its ranks raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankPool
from tiny import one_torch_thread
from torch import nn

from piper_owner.dag.nodes import Action, format_action
from piper_owner.errors import ExchangeError, MessageMismatchError
from piper_owner.executor.averaging import average_grads
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.local import run_threads
from piper_owner.executor.session import RankSession
from piper_owner.executor.stream import token_stream
from piper_owner.sharding import reduce_over
from piper_owner.steps import check_digits, digits_of
from piper_owner.transport import Fabric, GlooFabric

TOKENS: Final = np.random.default_rng(0).integers(0, 256, 4000).astype(np.int32)


class Drift:
    """Puts `session` one step ahead at the first action named `label`."""

    def __init__(self, session: RankSession, label: str) -> None:
        self._executor, self._label = session._executor, label

    @contextmanager
    def around(self, action: Action, step: int) -> Iterator[None]:
        """The seam: see StepObserver."""
        if format_action(action).startswith(self._label):
            self._executor.step += 1
        yield


def drifted(config: TrainConfig, run: RunKind, label: str, rank: int) -> list[str]:
    """The error of each rank where `rank` is a step ahead."""

    def work(fabric: Fabric) -> str:
        session = RankSession(config, run, fabric)
        if fabric.rank == rank:
            session.observe(Drift(session, label))
        try:
            for step in range(config.steps):
                session.train_step(token_stream(config, TOKENS).batch(step))
        except ExchangeError as error:
            return str(error)
        return "no error"

    return run_threads(config.num_ranks, work, timeout=timedelta(seconds=10))


@pytest.mark.parametrize(
    ("run", "label", "rank", "changes", "where"),
    [
        (RunKind.ALLREDUCE, "ALL_REDUCE[", 1, {}, "rank 0 in 0, rank 1 in 1"),
        (RunKind.ALLREDUCE, "ALL_REDUCE[", 0, {"dtype": "bfloat16"}, "rank 0 in 1, rank 1 in 0"),
        (RunKind.NAIVE, "CLIP", 1, {"clip": 0.5}, "rank 0 in 0, rank 1 in 1"),
        (RunKind.OWNER, "DP_ALL_REDUCE", 2, {"dp": 2}, "pipeline 0 in 0, pipeline 1 in 1"),
    ],
)
def test_a_rank_that_is_a_step_ahead_ends_the_sum_on_every_rank(
    run: RunKind, label: str, rank: int, changes: dict[str, Any], where: str
) -> None:
    config = TrainConfig(
        stages=2, microbatches=2, microbatch_size=1, sequence_length=8, vocab=256, hidden=8, heads=2,
        layers=2, steps=2, **{"dtype": "float64", **changes},
    )  # fmt: skip
    with one_torch_thread():
        errors = drifted(config, run, label, rank)
    summed = errors if "dp" not in changes else errors[::2]  # those of rank 0 of each pipeline
    assert len(summed) == 2
    for error in summed:
        assert f"{label}" in error
        assert f"are in different steps: {where}. All of them" in error


def test_without_parameters_nothing_is_averaged_and_pipelines_apart_raise() -> None:
    def work(fabric: Fabric) -> str:
        group = fabric.group((0, 1, 2), "gradients")
        average_grads([], group, fabric.rank, fabric.rank)
        parameter = nn.Parameter(torch.zeros(3))
        try:
            average_grads([parameter], group, fabric.rank, step=2**40 + fabric.rank // 2)
        except MessageMismatchError as error:
            return str(error)
        return "no error"

    first, *others = run_threads(3, work, timeout=timedelta(seconds=10))
    assert first.startswith(
        "the pipelines are in different steps: pipeline 0 in 1099511627776, pipeline 1 in 1099511627776, "
        "pipeline 2 in 1099511627777. "
    )
    assert others == [first] * 2


def reduces_over_shards(fabric: Fabric) -> list[str]:
    assert isinstance(fabric, GlooFabric)
    dist.init_process_group("gloo", store=fabric._store, rank=fabric.rank, world_size=2)
    found = []
    try:
        group = dist.new_group([0, 1])
        assert group is not None
        for values, largest in (((1.5, 2.0), False), ((1.5, float("nan")), True), ((-1.0, -2.0), True)):
            found.append(str(reduce_over([group], values[fabric.rank], 3, largest=largest)))
        try:
            reduce_over([group], 1.0, 3 + fabric.rank, largest=False)
        except MessageMismatchError as error:
            found.append(str(error))
    finally:
        dist.destroy_process_group()
    return found


def test_sums_over_shards_carry_the_step(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, reduces_over_shards)
    assert first == second
    assert first[:3] == ["3.5", "nan", "-1.0"]
    assert first[3].startswith("the ranks are in different steps: rank 0 in 3, rank 1 in 4. ")


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_a_step_survives_a_narrow_sum(steps: list[int], dtype: torch.dtype) -> None:
    size = len(steps)
    total = torch.zeros(4 * size, dtype=dtype)
    for place, step in enumerate(steps):
        total += torch.tensor(digits_of(step, place, size), dtype=dtype)
    if len(set(steps)) == 1:
        check_digits(total.tolist(), range(size))
    else:
        with pytest.raises(MessageMismatchError, match="rank 0 in "):
            check_digits(total.tolist(), range(size))
