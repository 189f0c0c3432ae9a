"""This rank's part in one tie: its parameter, its gradient, and the headers of its messages."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from piper_owner.errors import TieError
from piper_owner.ownership import TiePlan
from piper_owner.rows import RowsTable
from piper_owner.sharding import is_sharded, local_of
from piper_owner.transport.wire import Header, Phase

__all__ = [
    "Stepper",
    "TiedParameter",
    "header_of",
    "num_rows_with",
    "refuse_replaced",
    "rows_of",
    "take_grad",
    "warn_of_unlisted",
    "wide_dtype",
]


class Stepper(Protocol):
    """Steps one parameter, whole or in slices of its rows."""

    @property
    def chunkable(self) -> bool:
        """Whether stepping row slices gives the same bits as stepping the whole."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it steps and takes gradients: the master's, or else the parameter's."""
        ...

    def step_whole(self, grad: torch.Tensor) -> None:
        """Step the parameter with `grad`, of its shape and of `dtype`."""
        ...

    def step_rows(self, start: int, stop: int, grad: torch.Tensor) -> None:
        """Step rows `start` to `stop` with `grad` (stop - start, ...); ranges come in order."""
        ...

    def preview_rows(self, ids: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """What the rows `ids` become when stepped with `grad`, in the parameter's dtype; steps nothing."""
        ...

    def finish(self) -> None:
        """All rows of this step have been stepped."""
        ...


@dataclass(slots=True, kw_only=True)
class TiedParameter:
    """This rank's part in one tie; `stepper` is given on the owner and nowhere else."""

    plan: TiePlan
    parameter: nn.Parameter
    """Of a sharded stage a DTensor, whose local part alone travels."""
    places: tuple[tuple[nn.Module, str], ...] = ()
    """The (module, attribute) pairs that hold it on this rank."""
    source: int | None = None
    """The rank whose value is taken; None: that of the plan."""
    stepper: Stepper | None = None
    due: list[int] = field(default_factory=list)
    """Replicas whose gradient of this step is still to be received, ascending."""
    wire_dtype: torch.dtype | None = None
    """The dtype of gradients on the wire, the same on every holder; None: the parameter's."""
    is_claimed: bool = False
    """Whether an optimizer lists it."""
    is_empty: bool = False
    """Whether the parameter has memory and no value yet."""
    is_live: bool = True
    """Whether it requires a gradient in this step, as all holders have to agree."""
    wide_grad: torch.Tensor | None = None
    """The combined gradient of `finalize_grads`, where it is wider than `.grad` can be; before that, this
    rank's share of it, averaged over the pipelines, if there is one."""
    is_due: bool = False
    """On the owner among several pipelines: the combined gradient is still to be made."""
    is_updated: bool = False
    """Whether the last step changed the weights."""
    is_averaged: bool = False
    """Whether DistributedDataParallel averages this rank's gradient over the pipelines."""
    rows: RowsTable | None = None
    """What a replica has that keeps rows only; `parameter` is then its compact table."""
    served: dict[int, torch.Tensor] = field(default_factory=dict)
    """On the owner, by replica: the ids of the rows that it has now, int64, in its order."""
    asked: dict[int, tuple[torch.Tensor, bool]] = field(default_factory=dict)
    """On the owner, by replica: ids whose rows are to be sent, and whether they replace those it has."""
    asked_next: dict[int, torch.Tensor] = field(default_factory=dict)
    """On the owner, by replica: ids of the step after this one."""
    pushed: dict[int, torch.Tensor] = field(default_factory=dict)
    """On the owner, by replica: rows of the next step that were sent ahead of the others."""


def header_of(tie: TiedParameter, phase: Phase, step: int, *, num_rows: int | None = None) -> Header:
    """The header of a message about the whole of `tie`, this rank's shard of it, or some rows of it."""
    parameter = tie.parameter
    dtype = tie.wire_dtype if phase is Phase.GRAD and tie.wire_dtype is not None else parameter.dtype
    shape = tie.plan.shape if tie.rows is not None else tuple(local_of(parameter).shape)
    shape = shape if num_rows is None else (num_rows, *shape[1:])
    return Header(phase=phase, subject=tie.plan.name, step=step, dtype=dtype, shape=shape)


def wide_dtype(tie: TiedParameter) -> torch.dtype:
    """The dtype in which gradients of `tie` are added: float32 or wider."""
    own = tie.parameter.dtype
    wire = tie.wire_dtype or own
    return torch.promote_types(torch.float32, torch.promote_types(own, wire))


def num_rows_with(tie: TiedParameter, peer: int) -> int | None:
    """How many rows a gradient between this rank and `peer` has; None for all of them."""
    if tie.rows is not None:
        return tie.rows.ids.numel()
    return tie.served[peer].numel() if peer in tie.plan.row_replicas else None


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of `tensor`, with a first dimension to slice: a scalar becomes one row."""
    tensor = local_of(tensor)
    return tensor if tensor.dim() else tensor.view(1)


def take_grad(tie: TiedParameter) -> torch.Tensor | None:
    """The gradient of the tied parameter on this rank, dense: its local part, or that of fetched rows.

    An nn.Embedding(sparse=True) gives a sparse one; the sum with the head's is dense.
    """
    if tie.rows is not None:
        return tie.rows.take_grad()
    grad = tie.parameter.grad
    main = getattr(tie.parameter, "main_grad", None)
    if main is not None and (grad is None or bool(main.count_nonzero())):
        raise TieError(
            f"tie {tie.plan.tie.names}: the parameter has a .main_grad beside .grad, and only .grad is "
            "exchanged. Move the sum into .grad before the step, and leave main_grad unset or zero"
        )
    if grad is None:
        return None
    return grad.to_dense() if grad.is_sparse else local_of(grad)


def refuse_replaced(ties: Iterable[TiedParameter], rank: int) -> None:
    """Raise TieError if a module of `rank` no longer holds the Parameter that its tie steps. Local.

    It compares identities, and costs next to nothing while they are right.
    """
    for tie in ties:
        ours = tie.parameter if tie.rows is None else tie.rows.parameter
        for module, leaf in tie.places:
            found = module._parameters.get(leaf)
            if found is not ours and _is_replaced(tie, ours, found):
                raise TieError(
                    f"tie {tie.plan.tie.names}: the {leaf} of a {type(module).__name__} on rank {rank} is no "
                    "longer the Parameter that assign_owners found there: load_state_dict(assign=True), an "
                    "assignment or a conversion has replaced it, and the tie would miss its gradients. Do "
                    "that before assign_owners, or call assign_owners after it, on every rank, and make the "
                    "optimizer again"
                )


def _is_replaced(tie: TiedParameter, ours: nn.Parameter, found: nn.Parameter | None) -> bool:
    if found is None:  # a parametrization or pruning keeps it under another name
        return not any(p is ours for module, _ in tie.places for p in module.parameters())
    return not is_sharded(ours) or is_sharded(found)  # fully_shard shows the whole one for a while


def warn_of_unlisted(ties: Iterable[TiedParameter], rank: int) -> None:
    """Warn of each tie that has a gradient and that no optimizer lists: nothing trains it. Local."""
    for tie in ties:
        if not tie.is_claimed and tie.parameter.grad is not None:
            warnings.warn(
                f"tie {tie.plan.tie.names} has a gradient on rank {rank} and no OwnerOptimizer lists it, so "
                "it is not trained. Give it to the optimizer on every rank that holds it, or freeze "
                "it with requires_grad_(False)",
                stacklevel=6,
            )
