"""What an OwnerOptimizer says of its last step: bytes by kind, seconds by phase."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from owners import NAMES, Rank, ranks
from tiny import one_torch_thread

from piper_owner.grad_scaler import GradScaler
from piper_owner.stats import StepStats
from piper_owner.transport import BytesSent, Fabric
from piper_owner.transport.wire import HEADER_BYTES

ROWS, COLUMNS = 300, 5
SIZE = ROWS * COLUMNS * 8
CHUNK = 1024


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def table(fabric: Fabric, **options: Any) -> Rank:  # noqa: ANN401 - the options of any optimizer
    """A tied table of 300 x 5 float64 in chunks of 1 KiB."""
    values = {NAMES[fabric.rank]: torch.ones(ROWS, COLUMNS)} if fabric.rank < 2 else {"own.weight": 1.0}
    return Rank(fabric, values=values, assign={"chunk_bytes": CHUNK}, **options)


@pytest.mark.parametrize("clip", [False, True])
def test_the_bytes_of_one_side_are_those_of_the_other(clip: bool) -> None:
    def work(fabric: Fabric) -> list[StepStats]:
        rank = table(fabric)
        assert rank.opt.stats == StepStats()
        found = []
        for _ in range(3):
            if fabric.rank < 2:
                rank.backward()
            if clip:
                rank.opt.clip_grad_norm_(1.0)
            rank.opt.step()
            rank.opt.zero_grad()
            if fabric.rank < 2:
                rank.own.check()
            rank.own.sync()
            found.append(rank.opt.stats)
        return found

    owner, replica, other = ranks(3, work)
    weights, grads = BytesSent(weights=SIZE, other=HEADER_BYTES), BytesSent(grads=SIZE, other=HEADER_BYTES)
    for one, two, three in zip(owner, replica, other, strict=True):
        assert (one.sent, one.received) == (weights, grads)
        assert (two.sent, two.received) == (grads, weights)
        assert (three.sent, three.received) == (BytesSent(), BytesSent())


def test_an_absent_gradient_is_a_header() -> None:
    def work(fabric: Fabric) -> StepStats:
        rank = table(fabric, grads=(None, None))
        rank.step()
        return rank.opt.stats

    for stats in ranks(2, work):
        assert stats.sent == stats.received == BytesSent(other=HEADER_BYTES)


def test_a_skipped_step_counts_by_itself() -> None:
    def work(fabric: Fabric) -> list[BytesSent]:
        rank = table(fabric, grads=(2.0, float("inf")))
        scaler = GradScaler("cpu", init_scale=8.0)
        found = []
        for grad in (rank.grad, 1.0):
            rank.grad = grad
            rank.backward()
            scaler.step(rank.opt)
            scaler.update()
            rank.opt.zero_grad()
            found.append(rank.opt.stats.sent)
        return found

    owner, replica = ranks(2, work)
    assert owner == [BytesSent(), BytesSent(weights=SIZE, other=HEADER_BYTES)]
    assert replica == [BytesSent(grads=SIZE, other=HEADER_BYTES)] * 2


def test_seconds_add_up_to_no_more_than_the_step() -> None:
    def work(fabric: Fabric) -> tuple[float, StepStats]:
        rank = table(fabric, local=1.0) if fabric.rank == 2 else table(fabric)
        if fabric.rank < 2:
            rank.backward()
        else:
            rank.module.get_parameter("own.weight").grad = torch.ones(1, dtype=torch.float64)
        start = time.perf_counter()
        rank.opt.step()
        return time.perf_counter() - start, rank.opt.stats

    (owner_wall, owner), (replica_wall, replica), (other_wall, other) = ranks(3, work)
    for wall, stats in ((owner_wall, owner), (replica_wall, replica), (other_wall, other)):
        assert 0 < stats.seconds.total <= wall
    assert owner.seconds.grads > 0
    assert owner.seconds.ties > 0
    assert owner.seconds.weights == 0
    assert replica.seconds.weights > 0
    assert replica.seconds.ties == 0
    assert other.seconds.rest == other.seconds.total


def test_to_dict_is_json() -> None:
    def work(fabric: Fabric) -> str:
        rank = table(fabric)
        rank.step()
        return json.dumps(rank.opt.stats.to_dict())

    found = [json.loads(text) for text in ranks(2, work)]
    assert [each["sent"]["weights"] for each in found] == [SIZE, 0]
    assert [each["received"]["weights"] for each in found] == [0, SIZE]
    for each in found:
        assert list(each) == ["sent", "received", "seconds"]
        assert list(each["sent"]) == ["ids", "rows", "grads", "weights", "other"]
        assert list(each["seconds"]) == ["rows", "grads", "ties", "rest", "weights", "flush"]
