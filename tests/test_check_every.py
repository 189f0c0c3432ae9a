"""`--check-every N`: a replica that something else has written to ends the run at the check after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Final

import numpy as np
import pytest
import torch
from tiny import one_torch_thread

from piper_owner.dag.nodes import Action, format_action
from piper_owner.errors import ConfigError, ReplicaMismatchError
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.local import run_threads
from piper_owner.executor.session import RankSession
from piper_owner.executor.stream import token_stream
from piper_owner.transport import Fabric

TOKENS: Final = np.random.default_rng(0).integers(0, 256, 4000).astype(np.int32)
CONFIG: Final = TrainConfig(
    stages=2, microbatches=2, microbatch_size=1, sequence_length=8, vocab=256, hidden=8, heads=2, layers=2,
    steps=7, layout="dense",
)  # fmt: skip


class Scribble:
    """Changes one element of the replica after the weights of step 3 (from 0) have arrived."""

    def __init__(self, session: RankSession) -> None:
        (self._tie,) = session._executor.exchange.tied.values()

    @contextmanager
    def around(self, action: Action, step: int) -> Iterator[None]:
        """The seam: see StepObserver."""
        yield
        if step == 3 and format_action(action).startswith("RECV_WEIGHT"):
            with torch.no_grad():
                self._tie.parameter[5, 1] += 0.25


def steps_done(every: int, run: RunKind, *, scribbles: bool = True) -> list[tuple[int, str]]:
    """By rank, how many steps it took, and the error that ended it."""

    def work(fabric: Fabric) -> tuple[int, str]:
        config = replace(CONFIG, check_every=every)
        session = RankSession(config, run, fabric)
        if scribbles and run is RunKind.OWNER and fabric.rank == 1:
            session.observe(Scribble(session))
        done = 0
        try:
            for step in range(config.steps):
                session.train_step(token_stream(config, TOKENS).batch(step))
                done += 1
        except ReplicaMismatchError as error:
            return done, str(error)
        session.close()
        return done, ""

    with one_torch_thread():
        return run_threads(2, work, timeout=timedelta(seconds=20))


@pytest.mark.parametrize(("every", "found_at"), [(1, 4), (4, 4)])
def test_the_run_ends_at_the_check_on_every_holder(every: int, found_at: int) -> None:
    for done, error in steps_done(every, RunKind.OWNER):
        assert done == found_at - 1
        assert error.startswith(
            "tie ('embed.weight', 'head.weight'): a replica differs from the owner, rank 0, by up to 0.25"
        )
        assert f"after step {found_at} " in error


def test_a_check_of_right_replicas_changes_nothing() -> None:
    assert steps_done(2, RunKind.OWNER, scribbles=False) == [(7, "")] * 2


@pytest.mark.parametrize(("every", "run"), [(0, RunKind.OWNER), (8, RunKind.OWNER), (1, RunKind.NAIVE)])
def test_nothing_looks_where_no_check_is_due_or_copies_are_to_differ(every: int, run: RunKind) -> None:
    assert steps_done(every, run) == [(7, "")] * 2


def test_a_negative_number_of_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--check-every -1: a number of steps, or 0 for"):
        replace(CONFIG, check_every=-1)
