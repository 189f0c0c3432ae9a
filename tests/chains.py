"""Chains of lookups and matmuls that share one table, on any ranks, and their training as threads.

A chain is a list of parts in the order in which a hidden state passes through them. It is trained by a
loop of its own on every rank, over queues, and in one process by torch alone.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from owners import ranks
from torch import Tensor, nn

from piper_owner.assignment import Ownership, assign_over
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.stats import StepStats
from piper_owner.transport import Fabric

__all__ = ["Chain", "Found", "Loop", "Part", "alone", "closeness", "microbatches", "train"]

WAIT: Final = 20.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """One use of table number `table` on `rank`: a lookup of the ids, or else a matmul with all of it."""

    rank: int
    looks_up: bool = True
    table: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    """Of the nn.Embedding."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """What is trained, and how; the names of table t are `t<t>p<i>.use.weight` for each part i of it."""

    parts: tuple[Part, ...]
    vocab: int = 50
    width: int = 4
    num_ranks: int = 2
    layout: Any = "rows"
    owner: Any = "auto"
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.02})
    dtype: torch.dtype = torch.float64
    master_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    clip: float | None = None
    norm_type: float = 2.0
    fetch: str = "once"
    """All ids of a step at once, before `each` microbatch, or those of the `next` step before this one's."""
    assign: dict[str, Any] = field(default_factory=dict)

    @property
    def ties(self) -> list[list[str]]:
        """Those with the first lookup first, as in a language model."""
        tables = sorted({part.table for part in self.parts})
        return [[name(self, i) for i, p in enumerate(self.parts) if p.table == table] for table in tables]

    def initial(self, table: int) -> Tensor:
        """The value of a table before the first step."""
        made = torch.Generator().manual_seed(table + 1)
        return torch.randn(self.vocab, self.width, generator=made, dtype=torch.float64).to(self.dtype)


def name(chain: Chain, index: int) -> str:
    return f"t{chain.parts[index].table}p{index}.use.weight"


class Use(nn.Module):
    """One part: the shared table, and a layer of its own."""

    def __init__(self, chain: Chain, index: int, weight: nn.Parameter) -> None:
        super().__init__()
        part = chain.parts[index]
        if part.looks_up:
            self.use: nn.Module = nn.Embedding(chain.vocab, chain.width, **dict(part.options))
        else:
            self.use = nn.Linear(chain.width, chain.vocab, bias=False)
        self.use.weight = weight
        self.mix = nn.Linear(chain.width, chain.width).to(chain.dtype)
        made = torch.Generator().manual_seed(100 + index)
        for parameter in self.mix.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=made) / 2)

    def forward(self, hidden: Tensor, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(hidden))
        if isinstance(self.use, nn.Embedding):
            return hidden + self.use(ids)  # type: ignore[no-any-return]
        logits = self.use(hidden)
        signs = torch.linspace(-1, 1, logits.shape[-1]).to(hidden) / logits.shape[-1]
        return hidden + torch.sin(logits) @ signs[:, None]  # type: ignore[no-any-return]


def stage_of(chain: Chain, rank: int | None) -> nn.Module:
    """The parts on `rank`, or all of them over one table each."""
    stage = nn.Module()
    weights: dict[int, nn.Parameter] = {}
    for index, part in enumerate(chain.parts):
        if rank in (None, part.rank):
            if rank is not None or part.table not in weights:
                weights[part.table] = nn.Parameter(chain.initial(part.table))
            stage.add_module(f"t{part.table}p{index}", Use(chain, index, weights[part.table]))
    return stage


def share_of_loss(hidden: Tensor, num: int) -> Tensor:
    ramp = torch.linspace(0.5, 2, hidden.shape[-1]).to(hidden)
    return (torch.sin(hidden) * ramp).sum() / num


def microbatches(
    seed: int, *, vocab: int = 50, num: int = 2, shape: tuple[int, ...] = (2, 3)
) -> list[Tensor]:
    """One step's ids."""
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, shape, generator=made) for _ in range(num)]


Data = Sequence[Sequence[Tensor]]


@dataclass
class Found:
    """What a run has to show: losses by step, weights by name, norms, and by rank the stats of each step."""

    losses: list[float]
    weights: dict[str, Tensor]
    norms: list[float]
    stats: list[list[StepStats]] = field(default_factory=list)
    stages: list[nn.Module] = field(default_factory=list)
    owns: list[Ownership] = field(default_factory=list)


def alone(chain: Chain, data: Data) -> Found:
    """The same training in one process."""
    stage = stage_of(chain, None)
    parameters = list(stage.parameters())
    optimizer = chain.kind(parameters, **chain.options)
    losses, norms = [], []
    for step in data:
        total = 0.0
        for ids in step:
            hidden = torch.zeros(*ids.shape, chain.width, dtype=chain.dtype)
            for use in stage.children():
                hidden = use(hidden, ids)
            loss = share_of_loss(hidden, len(step))
            loss.backward()
            total += loss.item()
        if chain.clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(parameters, chain.clip, chain.norm_type)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Found(losses, values_of(stage), norms)


def values_of(stage: nn.Module) -> dict[str, Tensor]:
    named = stage.named_parameters(remove_duplicate=False)
    return {key: value.detach() for key, value in named}


class Loop:
    """One rank of a chain; `pass_` runs forward and backward of one microbatch."""

    def __init__(self, fabric: Fabric, chain: Chain, lines: list[tuple[Any, Any]]) -> None:
        self.fabric, self.chain, self.rank = fabric, chain, fabric.rank
        self.stage = stage_of(chain, fabric.rank)
        assign = {"layout": chain.layout, "owner": chain.owner, **chain.assign}
        self.own = assign_over(fabric, self.stage, chain.ties, **assign)
        # No schedule of torch is here, and to look through the process for one takes longer than to train.
        self.own._is_scaling_checked = True
        self.opt = OwnerOptimizer(
            self.stage.parameters(),
            chain.kind,
            ownership=self.own,
            master_dtype=chain.master_dtype,
            grad_dtype=chain.grad_dtype,
            **chain.options,
        )
        self.lines = lines
        self.uses = {i: use for i, use in enumerate(self._uses())}

    def _uses(self) -> Iterator[nn.Module | None]:
        for index, part in enumerate(self.chain.parts):
            own = part.rank == self.rank
            yield self.stage.get_submodule(f"t{part.table}p{index}") if own else None

    @property
    def looks_up(self) -> bool:
        return any(part.looks_up and part.rank == self.rank for part in self.chain.parts)

    def prefetch(self, ids: Sequence[Tensor], **options: bool) -> None:
        """All ids on a rank that looks some up, None on one that does not."""
        self.opt.prefetch(*(ids if self.looks_up else [None]), **options)

    def forward(self, ids: Tensor, *, share: int = 1) -> list[tuple[int, Tensor, Tensor]]:
        """(part, its input, its output) of this rank; the last part's output is the loss."""
        done = []
        for index, use in self.uses.items():
            if use is None:
                continue
            if index == 0:
                hidden = torch.zeros(*ids.shape, self.chain.width, dtype=self.chain.dtype)
            else:
                hidden = self.lines[index][0].get(timeout=WAIT)
            hidden = hidden.requires_grad_(torch.is_grad_enabled())
            out = use(hidden, ids)
            if index + 1 < len(self.uses):
                self.lines[index + 1][0].put(out.detach())
            else:
                out = share_of_loss(out, share)
            done.append((index, hidden, out))
        return done

    def backward(self, done: list[tuple[int, Tensor, Tensor]]) -> float:
        """The loss of this microbatch where the last part is, else 0."""
        loss = 0.0
        for index, hidden, out in reversed(done):
            if index + 1 < len(self.uses):
                out.backward(self.lines[index + 1][1].get(timeout=WAIT))
            else:
                out.backward()
                loss = out.item()
            if index:
                self.lines[index][1].put(hidden.grad)
        return loss

    def pass_(self, ids: Tensor, *, share: int = 1) -> float:
        """Forward and backward of one microbatch of `share`."""
        return self.backward(self.forward(ids, share=share))

    def steps(self, data: Data, *, check: bool = True) -> Found:
        """Train on `data`."""
        found = Found([], {}, [], [[]])
        if self.chain.fetch == "next":
            self.prefetch(data[0])
        for number, step in enumerate(data):
            if self.chain.fetch == "once":
                self.prefetch(step)
            total = 0.0
            for ids in step:
                if self.chain.fetch == "each":
                    self.prefetch([ids])
                total += self.pass_(ids, share=len(step))
            if self.chain.fetch == "next" and number + 1 < len(data):
                self.prefetch(data[number + 1], next_step=True)
            if self.chain.clip is not None:
                norm = self.opt.clip_grad_norm_(self.chain.clip, self.chain.norm_type)
                found.norms.append(float(norm))
            self.opt.step()
            self.opt.zero_grad()
            found.losses.append(total)
            found.stats[0].append(self.opt.stats)
            assert not check or self.own.check()
        return found


def train(
    chain: Chain, data: Data, *, work: Callable[[Loop], Found | None] | None = None, check: bool = True
) -> Found:
    """What all ranks found, by `Loop.steps` on `data`, or `work`."""
    lines: list[tuple[Any, Any]] = [(queue.SimpleQueue(), queue.SimpleQueue()) for _ in chain.parts]

    def one(fabric: Fabric) -> tuple[Found, Loop]:
        with_rows = Loop(fabric, chain, lines)
        found = with_rows.steps(data, check=check) if work is None else work(with_rows)
        return found or Found([], {}, [], [[]]), with_rows

    done = ranks(chain.num_ranks, one)
    weights: dict[str, Tensor] = {}
    for _, loop in done:
        kept = [tie.rows for tie in loop.own.exchange.tied.values() if tie.rows is not None]
        for key, value in values_of(loop.stage).items():
            parameter = loop.stage.get_parameter(key)
            if all(parameter is not rows.parameter for rows in kept):
                weights[key] = value
    founds = [found for found, _ in done]
    return Found(
        [sum(losses) for losses in zip(*[found.losses for found in founds], strict=True)],
        weights,
        founds[0].norms,
        [found.stats[0] for found in founds],
        [loop.stage for _, loop in done],
        [loop.own for _, loop in done],
    )


def closeness(found: Found, right: Found) -> float:
    """The largest difference in a loss, a norm or a weight."""
    losses = [abs(a - b) for a, b in zip(found.losses, right.losses, strict=True)]
    norms = [abs(a - b) for a, b in zip(found.norms, right.norms, strict=True)]
    assert set(found.weights) <= set(right.weights)
    weights = [
        float((value - right.weights[key]).abs().max()) if value.numel() else 0.0
        for key, value in found.weights.items()
    ]
    assert len(weights) > 0
    return max([0.0, *losses, *norms, *weights])
