"""Thousands of steps: memory, tensors, handles, threads and objects of Ray stay what they were after 100."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pytest
import torch
from ranks import RankPool
from ray import cloudpickle
from torch import nn

from piper_owner.assignment import assign_over
from piper_owner.executor.config import TrainConfig
from piper_owner.executor.session import StepReport
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.ownership import LayoutChoice
from piper_owner.runtime.actor import RankHost
from piper_owner.runtime.driver import train
from piper_owner.transport import Fabric

# Actors cannot import a test module, so the classes below travel as they are.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

WARM: Final = 100
"""Steps after which nothing grows any more."""
EVERY: Final = 25
KILOBYTES: Final = 8192
"""How far resident memory may be above that after `WARM` steps, whatever the number of steps."""

THREADS: Final = 2
"""How many more threads there may be, whatever the number of steps: Ray's own pools start and stop some."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a process has after `step` steps."""

    step: int
    kilobytes: int
    tensors: int
    files: int
    threads: int
    objects: int = 0
    """References to objects of Ray."""

    @classmethod
    def now(cls, step: int, *, objects: int = 0) -> Usage:
        """Measure this process."""
        gc.collect()
        status = Path("/proc/self/status").read_text()
        return cls(
            step=step,
            kilobytes=int(status.split("VmRSS:")[1].split()[0]),
            tensors=sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
            files=len(os.listdir("/proc/self/fd")),
            threads=int(status.split("Threads:")[1].split()[0]),
            objects=objects,
        )


def assert_flat(found: list[Usage]) -> None:
    """Nothing grows behind the first of `found`; memory and threads by no more than their noise."""
    first = found[0]
    for usage in found[1:]:
        for name in ("tensors", "files", "objects"):
            assert getattr(usage, name) <= getattr(first, name), (name, first, usage)
        assert usage.threads <= first.threads + THREADS, (first, usage)
        assert usage.kilobytes - first.kilobytes < KILOBYTES, (first, usage)


FIGURES: Final[list[str]] = []


def note(what: str, steps: int, by_rank: list[list[Usage]]) -> None:
    """Keep a line for the end of the tests."""
    for rank, found in enumerate(by_rank):
        first, last = found[0], found[-1]
        grown = max(usage.kilobytes for usage in found) - first.kilobytes
        FIGURES.append(
            f"{what}, {steps:,} steps, rank {rank}: {first.kilobytes / 1024:.1f} MiB after step "
            f"{first.step}, at most {grown:,} KiB more later; {last.tensors} tensors, {last.files} files, "
            f"{last.threads} threads, {last.objects} objects of Ray"
        )


@pytest.fixture(scope="module", autouse=True)
def _figures(show_at_end: Callable[[str, Callable[[], str]], None]) -> None:
    show_at_end("soak", lambda: "\n".join(FIGURES))


# -- the optimizer, in processes


def trains_long(fabric: Fabric, layout: LayoutChoice, steps: int) -> list[Usage]:
    """The embedding on rank 0, the head on rank 1, each with a loss of its own."""
    torch.manual_seed(fabric.rank)
    module: nn.Module = nn.Embedding(500, 16) if fabric.rank == 0 else nn.Linear(16, 500, bias=False)
    stage = nn.ModuleDict({"embed" if fabric.rank == 0 else "head": module, "own": nn.Linear(16, 16)})
    stage = stage.double()
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-1, 1, 8000).view(500, 16))  # type: ignore[operator]
    own = assign_over(fabric, stage, [("embed.weight", "head.weight")], layout=layout)
    opt = OwnerOptimizer(stage.parameters(), torch.optim.AdamW, ownership=own, lr=1e-3)
    draw = torch.Generator().manual_seed(0)
    found = []
    for step in range(1, steps + 1):
        ids = torch.randint(0, 500, (4, 16), generator=draw)
        opt.prefetch(ids if fabric.rank == 0 else None)
        hidden = module(ids) if fabric.rank == 0 else torch.ones(4, 16, dtype=torch.float64)
        (
            stage["own"](hidden).sum() + (0.0 if fabric.rank == 0 else module(hidden).square().mean())
        ).backward()
        if step % 3 == 0:
            opt.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
        if step % EVERY == 0:
            assert own.check()
            if step >= WARM:
                found.append(Usage.now(step))
    own.close()
    return found


LENGTHS: Final = [150, pytest.param(2000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("layout", ["dense", "rows"])
def test_many_steps_of_the_optimizer_leave_nothing_behind(
    rank_pool: RankPool, layout: LayoutChoice, steps: int
) -> None:
    by_rank = rank_pool.run_within(
        2, trains_long, (layout, steps), timeout=timedelta(seconds=60), limit=900.0
    )
    note(f"optimizer, {layout}", steps, by_rank)
    for found in by_rank:
        assert found[-1].step == steps
        assert_flat(found)


# -- Ray


def num_references() -> int:
    """Objects of Ray to which this process refers."""
    from ray._private.worker import global_worker

    return len(cast("Any", global_worker).core_worker.get_all_reference_counts())


class Measured(RankHost):
    """Writes down what its process has, into the folder that the driver names."""

    def step(self, index: int) -> StepReport:
        report = super().step(index)
        done = index + 1
        if done >= WARM and done % EVERY == 0:
            usage = Usage.now(done, objects=num_references())
            with open(Path(FOLDER_FILE.read_text(), f"rank{self.rank}"), "a") as file:
                file.write(json.dumps(asdict(usage)) + "\n")
        return report


FOLDER_FILE: Final = Path(tempfile.gettempdir()) / f"piper-owner-soak-{os.getpid()}"


@contextlib.contextmanager
def folder_named(folder: Path) -> Iterator[None]:
    """Where `Measured` writes, which knows no more than this module's constants."""
    FOLDER_FILE.write_text(str(folder))
    try:
        yield
    finally:
        FOLDER_FILE.unlink()


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.usefixtures("ray_cluster")
def test_many_steps_on_ray_leave_nothing_behind(tmp_path: Path, steps: int) -> None:
    config = TrainConfig(
        stages=2, microbatches=2, microbatch_size=1, sequence_length=8, vocab=256, hidden=8, heads=2,
        layers=2, steps=steps, clip=1.0, check_every=EVERY, timeout_seconds=60,
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 256, 40_000).astype(np.int32)
    driver: list[Usage] = []

    def on_step(progress: Any) -> None:  # noqa: ANN401 - a StepProgress
        if progress.step >= WARM and progress.step % EVERY == 0:
            driver.append(Usage.now(progress.step, objects=num_references()))

    with folder_named(tmp_path):
        result = train(config, tokens, text="numbers", on_step=on_step, host_class=Measured)
    assert result.replicas_equal
    assert len(result.runs[next(iter(result.runs))].losses) == steps
    by_rank = [
        [Usage(**json.loads(line)) for line in (tmp_path / f"rank{rank}").read_text().splitlines()]
        for rank in range(config.num_ranks)
    ]
    note("Ray, an actor", steps, by_rank)
    note("Ray, the driver", steps, [driver])
    for found in by_rank:
        assert found[-1].step == steps
        assert_flat(found)
    # The driver keeps each step's figures; and threads of other tests come and go in this process.
    objects = [usage.objects for usage in driver]
    assert max(objects) - objects[0] <= 2 * config.num_ranks * 3
    assert driver[-1].tensors <= driver[0].tensors
    assert driver[-1].kilobytes - driver[0].kilobytes < KILOBYTES + 8 * steps
