"""The owner's step, and the moves of rows, against what the memory of the device allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

from piper_owner.gpu_check.crew import Crew, Rank
from piper_owner.gpu_check.result import CheckResult, Figure, Status
from piper_owner.gpu_check.sizes import Sizes
from piper_owner.gpu_check.timing import copy_rate, median_seconds
from piper_owner.stepping import ParameterStepper
from piper_owner.transport.wire import row_ranges, rows_per_chunk

__all__ = ["LEAST_OF_BOUND", "MOST_CHUNK_COST", "check_owner_step", "check_rows"]

LEAST_OF_BOUND: Final = 0.8
"""The owner's step reaches at least this part of what copying the same bytes takes."""

MOST_CHUNK_COST: Final = 0.03
"""Stepping in chunks takes at most this part longer, with the best size of a chunk."""

_LIMIT: Final = 100.0
_TABLES_MOVED: Final = 7
# Fused AdamW reads weight, gradient and two moments, and writes all but the gradient.
_TABLES_KEPT: Final = 9
# Those four, the bits of four before and after, and one to spare.


def check_owner_step(crew: Crew, sizes: Sizes, *, is_judged: bool) -> Iterator[CheckResult]:
    """The step of one large table by its owner, whole and in chunks; `is_judged`: also how fast."""
    name = "owner step"
    figures: dict[str, Figure] = crew.run(1, time_owner_step, limit=_LIMIT)[0]
    if "short_of_bytes" in figures:
        yield CheckResult(
            name=name,
            status=Status.SKIPPED,
            reason=f"the table of {sizes.owner_rows:,} x {sizes.owner_columns:,} needs "
            f"{figures['needed_bytes']:,} bytes of memory, {figures['short_of_bytes']:,} more than are free",
            figures=figures,
        )
        return
    wrong = [] if figures["same_bits"] else ["the step in chunks gave other bits than the whole one"]
    of_bound, cost = figures["of_bound"], figures["chunk_cost"]
    assert isinstance(of_bound, float)
    assert isinstance(cost, float)
    if is_judged and of_bound < LEAST_OF_BOUND:
        wrong.append(f"{of_bound:.0%} of what copying allows, and {LEAST_OF_BOUND:.0%} is to be reached")
    if is_judged and cost > MOST_CHUNK_COST:
        wrong.append(f"chunks cost {cost:.1%} at best, and {MOST_CHUNK_COST:.0%} is allowed")
    yield CheckResult(
        name=name,
        status=Status.FAILED if wrong else Status.OK,
        reason="; ".join(wrong),
        shown=f"{of_bound:.0%} of what copying allows; in chunks of {figures['best_chunk_mib']:g} MiB "
        f"{cost:+.1%}, the same bits",
        figures=figures,
    )


def time_owner_step(rank: Rank) -> dict[str, Figure]:
    """Seconds of a step of the table, whole and by size of chunk; and whether the bits are the same."""
    sizes, device = rank.sizes, rank.device
    table_bytes = 4 * sizes.owner_rows * sizes.owner_columns
    if rank.is_cuda:
        free, _ = torch.cuda.mem_get_info(device)
        needed = _TABLES_KEPT * table_bytes
        if free < needed:
            return {"needed_bytes": needed, "short_of_bytes": needed - free}
    rate = copy_rate(device, table_bytes, rounds=sizes.rounds)
    table = _Table(sizes, device)
    works = [table.step_whole, *(lambda size=size: table.step_chunks(size) for size in sizes.chunk_bytes)]
    whole, *chunked = median_seconds(device, works, rounds=sizes.rounds)
    costs = {size: seconds / whole - 1 for size, seconds in zip(sizes.chunk_bytes, chunked, strict=True)}
    best = min(costs, key=lambda size: costs[size])
    bound = _TABLES_MOVED * table_bytes / rate
    figures: dict[str, Figure] = {
        "copy_bytes_per_second": rate,
        "bound_seconds": bound,
        "whole_seconds": whole,
        "of_bound": bound / whole,
        "chunk_cost": costs[best],
        "best_chunk_mib": best / 2**20,
        "same_bits": _same_bits(table, sizes.chunk_bytes[0]),
    }
    return figures | {f"chunk_cost_{size / 2**20:g}_mib": cost for size, cost in costs.items()}


class _Table:
    """A table that fused AdamW steps, and a gradient for it."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        shape = (sizes.owner_rows, sizes.owner_columns)
        self.weight = nn.Parameter(torch.empty(shape, device=device).normal_(0, 0.02, generator=generator))
        self.grad = torch.empty(shape, device=device).normal_(0, 1e-3, generator=generator)
        self.optimizer = torch.optim.AdamW([self.weight], lr=1e-3, fused=True)
        self._stepper = ParameterStepper(self.optimizer, self.weight)

    def step_whole(self) -> None:
        """One step of all rows."""
        self._stepper.step_whole(self.grad)
        self._stepper.finish()
        self.weight.grad = None

    def step_chunks(self, chunk_bytes: int) -> None:
        """One step, chunk by chunk."""
        rows = len(self.weight)
        for start, stop in row_ranges(rows, rows_per_chunk(tuple(self.weight.shape), 4, chunk_bytes)):
            self._stepper.step_rows(start, stop, self.grad[start:stop])
        self._stepper.finish()


def _same_bits(table: _Table, chunk_bytes: int) -> bool:
    """Whether a step of `table` in chunks gives what a whole one gives. Steps it."""
    before = table.weight.detach().clone()
    state = table.optimizer.state[table.weight]
    kept = {key: value.clone() for key, value in state.items()}
    table.step_whole()
    whole = table.weight.detach().clone()
    with torch.no_grad():
        table.weight.copy_(before)
    del before
    for key, value in kept.items():
        table.optimizer.state[table.weight][key].copy_(value)
    table.step_chunks(chunk_bytes)
    return torch.equal(table.weight.detach(), whole)


def check_rows(crew: Crew) -> Iterator[CheckResult]:
    """The gather of rows and the addition of their gradients: right, and how fast."""
    figures: dict[str, Figure] = crew.run(1, time_rows, limit=_LIMIT)[0]
    wrong = []
    if not figures["gather_is_right"]:
        wrong.append("index_select gave other rows than were asked for")
    if not figures["add_is_right"]:
        wrong.append("index_add_ gave another sum, or other bits the second time")
    yield CheckResult(
        name="rows",
        status=Status.FAILED if wrong else Status.OK,
        reason="; ".join(wrong),
        shown=f"of a copy's rate: gather {figures['gather_of_copy']:.0%}, "
        f"index_add_ {figures['add_of_copy']:.0%}",
        figures=figures,
    )


def time_rows(rank: Rank) -> dict[str, Figure]:
    """Rates of a gather and an index_add_ of some rows of the table, which are each there once."""
    sizes, device = rank.sizes, rank.device
    # A quarter of the table: more than a cache holds, and there on any GPU.
    num_rows = sizes.owner_rows // 4
    generator = torch.Generator(device).manual_seed(0)
    table = torch.empty(num_rows, sizes.owner_columns, device=device).normal_(generator=generator)
    ids = torch.randperm(num_rows, device=device, generator=generator)[: sizes.touched_rows]
    rows = torch.empty(len(ids), sizes.owner_columns, device=device)
    grads = torch.empty_like(rows).normal_(generator=generator)
    rate = copy_rate(device, rows.nbytes, rounds=sizes.rounds)
    right = torch.stack([table[index] for index in ids.tolist()[:64]])
    torch.index_select(table, 0, ids, out=rows)
    gathered = torch.equal(rows[:64], right)
    expected = rows + grads
    sums = [table.clone().index_add_(0, ids, grads) for _ in range(2)]
    added = torch.equal(sums[0], sums[1]) and torch.equal(sums[0][ids], expected)
    del sums, expected
    gather, add = median_seconds(
        device,
        [lambda: torch.index_select(table, 0, ids, out=rows), lambda: table.index_add_(0, ids, grads)],
        rounds=sizes.rounds,
        repeats=10,
    )
    return {
        "copy_bytes_per_second": rate,
        "gather_bytes_per_second": 2 * rows.nbytes / gather,
        "add_bytes_per_second": 3 * rows.nbytes / add,
        "gather_of_copy": 2 * rows.nbytes / gather / rate,
        "add_of_copy": 3 * rows.nbytes / add / rate,
        "gather_is_right": gathered,
        "add_is_right": added,
    }
