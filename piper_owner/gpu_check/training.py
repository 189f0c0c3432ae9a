"""Two ranks on one device train a tied model and equal one process; what each way takes of memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from piper_owner.gpu_check.crew import Crew
from piper_owner.gpu_check.result import CheckResult, Figure, Status
from piper_owner.gpu_check.sizes import Sizes
from piper_owner.gpu_check.ways import Outcome, Way, train_alone, train_way

__all__ = ["LOSS_TOLERANCE", "UPDATE_TOLERANCE", "check_memory", "check_training"]

LOSS_TOLERANCE: Final = {"float32": 1e-5, "bfloat16": 1e-3}
"""The most by which a loss may differ from that of one process, relative to it."""

UPDATE_TOLERANCE: Final = {"float32": 1e-4, "bfloat16": 0.05}
"""The most by which the weights may, relative to how far they have moved: both as L2 norms."""

_LIMIT: Final = 100.0


def check_training(crew: Crew, name: str) -> Iterator[CheckResult]:
    """Dense and rows against one process, in `name` (float32; bfloat16 with masters in float32)."""
    file = f"reference-{name}.pt"
    alone: Outcome = crew.run(1, train_alone, name, file, limit=_LIMIT)[0]
    for way in (Way.DENSE, Way.ROWS):
        ranks: list[Outcome] = crew.run(2, train_way, way, name, file, limit=_LIMIT)
        yield _compare(way, name, alone, ranks)


def _compare(way: Way, name: str, alone: Outcome, ranks: list[Outcome]) -> CheckResult:
    losses = [sum(shares) for shares in zip(*(rank.losses for rank in ranks), strict=True)]
    pairs = list(zip(losses, alone.losses, strict=True))
    loss = max(abs(mine - right) / abs(right) for mine, right in pairs)
    update = math.sqrt(sum(rank.gap for rank in ranks) / sum(rank.moved for rank in ranks))
    stepping = [rank for rank, outcome in enumerate(ranks) if outcome.state > 0]
    wrong = []
    if not loss <= LOSS_TOLERANCE[name]:
        wrong.append(f"a loss differs by {loss:.1e} of it, more than {LOSS_TOLERANCE[name]:g}")
    if not update <= UPDATE_TOLERANCE[name]:
        wrong.append(f"the updates differ by {update:.1e} of them, more than {UPDATE_TOLERANCE[name]:g}")
    if len(stepping) != 1:
        wrong.append(f"the ranks {stepping} have optimizer state of the tie, and one should")
    if not losses[-1] < losses[0]:  # the same batch: the number of steps is odd
        wrong.append(f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f}")
    figures: dict[str, Figure] = {
        "loss_difference": loss,
        "loss_tolerance": LOSS_TOLERANCE[name],
        "update_difference": update,
        "update_tolerance": UPDATE_TOLERANCE[name],
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    return CheckResult(
        name=f"train {name} {way.value}",
        status=Status.FAILED if wrong else Status.OK,
        reason="; ".join(wrong),
        shown=f"equals one process: losses to {loss:.1e} of {LOSS_TOLERANCE[name]:g}, "
        f"updates to {update:.1e} of {UPDATE_TOLERANCE[name]:g}",
        figures=figures,
    )


def check_memory(crew: Crew, sizes: Sizes) -> Iterator[CheckResult]:
    """The allocator's peaks of each way; what the package saves is there, table by table."""
    found = {way: crew.run(2, train_way, way, "float32", None, limit=_LIMIT) for way in Way}
    figures: dict[str, Figure] = {"table_bytes": sizes.table_bytes}
    for way, ranks in found.items():
        for rank, outcome in enumerate(ranks):
            key = way.value.replace("-", "")
            figures |= {f"{key}_rank{rank}_peak": outcome.peak, f"{key}_rank{rank}_held": outcome.held}
    held = {way: sum(outcome.held for outcome in ranks) for way, ranks in found.items()}
    # Dense saves the two moments of one rank, and rows its weight, too: less buffers, and rows in use.
    wrong = []
    for way, least in ((Way.DENSE, 1.8), (Way.ROWS, 2.7)):
        saved = (held[Way.NAIVE] - held[way]) / sizes.table_bytes
        figures[f"{way.value}_tables_saved"] = saved
        if saved < least:
            wrong.append(f"{way.value} holds {saved:.2f} tables less than naive, and {least} are to be saved")
    peaks = {way: "+".join(f"{outcome.peak / 1e6:.0f}" for outcome in ranks) for way, ranks in found.items()}
    yield CheckResult(
        name="memory",
        status=Status.FAILED if wrong else Status.OK,
        reason="; ".join(wrong),
        shown="peak MB of both ranks: " + ", ".join(f"{way.value} {text}" for way, text in peaks.items()),
        figures=figures,
    )
