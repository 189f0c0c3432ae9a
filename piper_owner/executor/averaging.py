"""Averages the parameters that are no tie over equal pipelines that train on other data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from piper_owner.steps import check_steps
from piper_owner.transport.base import Group

__all__ = ["average_grads", "share_values"]

_LEAD: Final = 0
_BYTES: Final = 25 * 2**20
"""The most that one all-reduce takes, if it has more than one gradient."""


def average_grads(parameters: Sequence[nn.Parameter], group: Group, pipeline: int, step: int) -> None:
    """Replace each gradient by its mean over `group`, the same bits on each of its ranks.

    A None counts as zeros, unless all of them are None, which stays so. Sums are made in float32 or
    wider. Collective over the group, whose ranks are the pipelines, this one `pipeline`, with the same
    parameters. Raises MessageMismatchError on every rank unless all of them are in the same `step`.
    """
    if not parameters:
        return
    present = torch.zeros(len(parameters) + len(group.ranks), dtype=torch.float64, device="cpu")
    present[: len(parameters)] = torch.tensor([p.grad is not None for p in parameters], device="cpu")
    present[len(parameters) + group.ranks.index(pipeline)] = step
    group.all_reduce(present)
    counts = present.tolist()
    check_steps(counts[len(parameters) :], group.ranks, "pipeline")
    live = [p for p, count in zip(parameters, counts, strict=False) if count]
    for batch in _batches(live):
        flat = torch.cat([_flat_grad(parameter) for parameter in batch])
        group.all_reduce(flat)
        flat.div_(len(group.ranks))
        start = 0
        for parameter in batch:
            mean = flat[start : start + parameter.numel()].view(parameter.shape)
            parameter.grad = mean.to(parameter.device, parameter.dtype, copy=True)
            start += parameter.numel()


def _flat_grad(parameter: nn.Parameter) -> Tensor:
    wide = torch.promote_types(torch.float32, parameter.dtype)
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=wide, device="cpu")
    dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return dense.detach().to("cpu", wide).reshape(-1)


def _batches(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters of one dtype, as many as fit."""
    batch: list[nn.Parameter] = []
    for parameter in parameters:
        size = sum(other.nbytes for other in batch) + parameter.nbytes
        if batch and (batch[0].dtype != parameter.dtype or size > _BYTES):
            yield batch
            batch = []
        batch.append(parameter)
    if batch:
        yield batch


@torch.no_grad()
def share_values(parameters: Iterable[nn.Parameter], group: Group) -> None:
    """Give each of `parameters` the value that it has in the first pipeline, bit for bit. Collective."""
    for parameter in parameters:
        value = parameter.detach().to("cpu", copy=True).contiguous()
        group.broadcast(value.view(-1).view(torch.uint8), _LEAD)  # gloo lacks some dtypes
        parameter.copy_(value)
