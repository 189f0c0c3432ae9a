"""Snapshots of a rank's whole state: their form, who has which, and that a run goes on from them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch

from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.local import run_threads
from piper_owner.executor.session import RankSession
from piper_owner.executor.snapshots import Holdings, Recovery, Shelf, pack, peer_of, plan_recovery, unpack
from piper_owner.executor.stream import token_stream
from piper_owner.transport.base import Fabric

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
    timeout_seconds=30,
)
TOKENS = np.arange(400, dtype=np.int32) ** 2 % 251
Weights = dict[str, torch.Tensor]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_block_gives_back_every_bit() -> None:
    tensors = {
        "a": torch.randn(3, 5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(7.0),
        "b": torch.randn(7).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "columns": torch.randn(4, 6).t(),
        "long": torch.arange(5),
    }
    values = {"losses": [0.1, 1e-300], "state/0/step": 3, "none": None}
    snapshot = pack(9, tensors, values)
    assert snapshot.step == 9
    found, given = unpack(snapshot)
    assert given == values
    assert list(found) == list(tensors)
    for name, value in tensors.items():
        mine, on_cpu = found[name]
        assert on_cpu
        assert (mine.dtype, mine.shape) == (value.dtype, value.shape)
        assert bits(mine) == bits(value)
    tensors["a"].zero_()
    assert not torch.equal(found["a"][0], tensors["a"]), "a snapshot is a copy"


def test_the_latest_step_that_all_can_go_back_to() -> None:
    everyone = {rank: Holdings(own=frozenset({4, 6}), copies=frozenset({4, 6})) for rank in range(3)}
    assert plan_recovery(everyone, 3) == Recovery(step=6, from_peer=())
    assert plan_recovery({0: everyone[0], 1: everyone[1]}, 3) == Recovery(step=6, from_peer=(2,))
    assert plan_recovery({1: everyone[1]}, 3) is None
    late = everyone | {0: Holdings(own=frozenset({4, 6}), copies=frozenset({4}))}
    assert plan_recovery({0: late[0], 1: late[1]}, 3) == Recovery(step=4, from_peer=(2,))
    assert plan_recovery({}, 3) is None
    # Two far apart may be lost at once.
    four = {rank: Holdings(own=frozenset({6}), copies=frozenset({6})) for rank in (1, 3)}
    assert plan_recovery(four, 4) == Recovery(step=6, from_peer=(0, 2))


def test_a_plan_asks_for_nothing_that_is_not_there() -> None:
    """All states of three ranks and two steps: there is no plan only if none is possible."""
    kinds = [frozenset(steps) for steps in ((), (1,), (2,), (1, 2))]
    held = [None, *(Holdings(own=own, copies=copies) for own in kinds for copies in kinds)]
    for state in itertools.product(held, repeat=3):
        holdings = {rank: each for rank, each in enumerate(state) if each is not None}
        possible = [
            step
            for step in (1, 2)
            if all(
                (rank in holdings and step in holdings[rank].own)
                or (peer_of(rank, 3) in holdings and step in holdings[peer_of(rank, 3)].copies)
                for rank in range(3)
            )
        ]
        plan = plan_recovery(holdings, 3)
        assert (plan.step if plan is not None else 0) == max(possible, default=0)


def run_on(
    config: TrainConfig, kind: RunKind, shelves: list[Shelf], *, start: int, stop: int, every: int
) -> list[tuple[list[float], Weights]]:
    """Train steps `start` to `stop`, from the snapshots on `shelves` unless at 0; losses, weights by rank."""
    stream = token_stream(config, TOKENS)

    def work(fabric: Fabric) -> tuple[list[float], Weights]:
        shelf = shelves[fabric.rank]
        session = RankSession(config, kind, fabric, shelf=shelf)
        if start:
            session.replicator.restore(shelf.own[start])
        losses = []
        for step in range(start, stop):
            losses.append(session.train_step(stream.batch(step)).loss)
            if (step + 1) % every == 0:
                session.replicator.take()
        if kind is RunKind.OWNER:
            session.check()
        session.close()
        return losses, session.weights()

    return run_threads(config.num_ranks, work, timeout=timedelta(seconds=30))


CASES = [
    ({}, RunKind.OWNER),
    ({"layout": "dense", "optimizer": "sgd", "clip": 0.1}, RunKind.OWNER),
    ({"dp": 2, "stages": 2, "devices": 2, "scope": "global", "optimizer": "adam"}, RunKind.OWNER),
    ({"placement": "v", "stages": 4, "devices": 2, "layers": 4, "schedule": "zbv"}, RunKind.OWNER),
    ({"optimizer": "adafactor", "dtype": "bfloat16"}, RunKind.OWNER),
    ({"stages": 2, "devices": 2}, RunKind.NAIVE),
    ({"dp": 2, "stages": 2, "devices": 2}, RunKind.ALLREDUCE),
]


@pytest.mark.parametrize(("changes", "kind"), CASES)
def test_a_run_goes_on_from_its_own_snapshots_and_from_copies(
    changes: dict[str, object], kind: RunKind
) -> None:
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    size = config.num_ranks
    straight = run_on(config, kind, [Shelf() for _ in range(size)], start=0, stop=6, every=99)
    shelves = [Shelf() for _ in range(size)]
    run_on(config, kind, shelves, start=0, stop=5, every=2)
    for rank, shelf in enumerate(shelves):
        assert set(shelf.own) == set(shelf.copies) == {2, 4}
        mine, copy = shelf.own[4].data, shelves[peer_of(rank, size)].copies[4].data
        assert np.array_equal(mine, copy)
        assert mine is not copy
    for step in (2, 4):
        # The first rank is new: it has nothing, and gets what the next one has kept.
        again = [Shelf() for _ in range(size)]
        for rank, shelf in enumerate(shelves):
            again[rank].own[step] = shelf.own[step] if rank else shelves[peer_of(0, size)].copies[step]
        ended = run_on(config, kind, again, start=step, stop=6, every=99)
        for (losses, weights), (expected, right) in zip(ended, straight, strict=True):
            assert losses == expected[step:]
            assert all(torch.equal(weights[name], value) for name, value in right.items())


def test_no_more_than_two_are_kept() -> None:
    shelves = [Shelf() for _ in range(3)]
    run_on(CONFIG, RunKind.OWNER, shelves, start=0, stop=6, every=1)
    for shelf in shelves:
        assert set(shelf.own) == set(shelf.copies) == {5, 6}
