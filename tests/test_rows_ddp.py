"""Rows in pipelines side by side, with the process groups of a user and DistributedDataParallel."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from owners import process_group
from tiny import one_torch_thread
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from piper_owner.assignment import assign_owners
from piper_owner.errors import PiperOwnerError, RowIndexError
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.transport import Fabric

if TYPE_CHECKING:
    from ranks import RankPool

TIE = (("embed.weight", "head.weight"),)
VOCAB = 97


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


class Part(nn.Module):
    """Half of a small language model; the embedding has a padding id."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        table = torch.randn(VOCAB, 4)
        if stage == 0:
            self.embed = nn.Embedding(VOCAB, 4, _weight=table, padding_idx=1)
        else:
            self.head = nn.Linear(4, VOCAB, bias=False)
            self.head.weight = nn.Parameter(table)
        self.mix = nn.Linear(4, 4)
        self.stage = stage
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.stage == 0:
            return torch.tanh(self.mix(self.embed(x)))
        logits: Tensor = self.head(torch.tanh(self.mix(x)))
        return logits


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Six sequences; a pipeline's share looks up rows that the other one's does not."""
    ids = torch.randint(0, VOCAB, (6, 5), generator=torch.Generator().manual_seed(step))
    ids[0, 0] = 1
    return ids, (ids + 1) % VOCAB


def pipelines(fabric: Fabric, dp: int, wrap: bool, clip: float | None, fetch: str) -> dict[str, Tensor]:
    """Five AdamW steps over two microbatches; the rank's weights, and what it sent in the last step."""
    with process_group(fabric):
        mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "pp"))
        index, stage = divmod(fabric.rank, 2)
        part: nn.Module = Part(stage)
        inner, pipeline = part, mesh.get_group("pp")
        own = assign_owners(part, TIE, group=mesh["pp"], layout="rows", dp_group=mesh["dp"])
        if wrap:
            part = DistributedDataParallel(part, process_group=mesh.get_group("dp"))
        opt = OwnerOptimizer(part.parameters(), torch.optim.AdamW, ownership=own, lr=0.05)
        for step in range(5):
            ids, labels = (each.chunk(dp)[index] for each in batch(step))
            if fetch == "once" or step == 0:
                opt.prefetch(ids if stage == 0 else None)
            between = torch.empty(*ids.shape, 4, dtype=torch.float64)
            if stage == 0:
                out = part(ids)
                dist.send(out.detach(), group=pipeline, group_dst=1)
                dist.recv(between, group=pipeline, group_src=1)
                out.backward(between)
            else:
                dist.recv(between, group=pipeline, group_src=0)
                between.requires_grad_()
                nn.functional.cross_entropy(part(between).flatten(0, 1), labels.flatten()).backward()
                assert between.grad is not None
                dist.send(between.grad, group=pipeline, group_dst=0)
            if not wrap:
                for parameter in inner.mix.parameters():  # type: ignore[union-attr]
                    dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
                    parameter.grad /= dp  # type: ignore[operator]
            if fetch == "next" and step < 4:
                opt.prefetch(batch(step + 1)[0].chunk(dp)[index] if stage == 0 else None, next_step=True)
            if clip is not None:
                opt.clip_grad_norm_(clip)
            opt.step()
            opt.zero_grad()
            assert own.check()
        assert (opt.stats.sent.ids > 0) == (stage == 0 and fetch == "once")
        found = dict(inner.named_parameters())
        rows = found.pop("embed.weight", torch.empty(0))
        assert len(rows) <= 64, "a compact table"
        result = {name: value.detach().clone() for name, value in found.items()}
        own.close()
        return result


def one_process(clip: float | None) -> dict[str, Tensor]:
    first, second = Part(0), Part(1)
    second.head.weight = first.embed.weight
    parameters = {**dict(first.named_parameters()), **dict(second.named_parameters())}
    stages = nn.ModuleList([first, second])
    optimizer = torch.optim.AdamW(stages.parameters(), lr=0.05)
    for step in range(5):
        ids, labels = batch(step)
        nn.functional.cross_entropy(second(first(ids)).flatten(0, 1), labels.flatten()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(stages.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    named = {f"{i}.{name}": p for i, each in enumerate(stages) for name, p in each.named_parameters()}
    assert parameters
    return {name: value.detach() for name, value in named.items()} | {
        "1.head.weight": first.embed.weight.detach()
    }


@pytest.mark.parametrize(
    ("dp", "wrap", "clip", "fetch"),
    [
        (2, True, 0.3, "next"),
        (3, True, None, "once"),
        pytest.param(2, False, None, "next", marks=pytest.mark.slow),
        pytest.param(3, False, 0.3, "once", marks=pytest.mark.slow),
    ],
)
def test_rows_in_pipelines_side_by_side_are_one_process(
    rank_pool: RankPool, dp: int, wrap: bool, clip: float | None, fetch: str
) -> None:
    right = one_process(clip)
    for rank, found in enumerate(rank_pool.run(2 * dp, pipelines, dp, wrap, clip, fetch)):
        assert ("head.weight" in found) == (rank % 2 == 1)
        for name, value in found.items():
            assert torch.allclose(value, right[f"{rank % 2}.{name}"], rtol=0, atol=1e-10), name


def wrong_id(fabric: Fabric) -> str:
    """One pipeline of two is given an id outside the vocabulary; then all of them train on."""
    with process_group(fabric):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        stage = fabric.rank % 2
        part = Part(stage)
        own = assign_owners(part, TIE, group=mesh["pp"], layout="rows", dp_group=mesh["dp"])
        opt = OwnerOptimizer(part.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        with pytest.raises(IndexError) as caught:
            opt.prefetch(torch.tensor([3, VOCAB if fabric.rank == 2 else 4]))
        assert isinstance(caught.value, RowIndexError)
        opt.prefetch(torch.tensor([3, 4]))
        if stage == 0:
            part.embed(torch.tensor([3])).sum().backward()
        opt.step()
        assert own.check()
        own.close()
        return str(caught.value)


def test_case_50_in_one_pipeline_is_an_error_on_every_rank_of_all(rank_pool: RankPool) -> None:
    for text in rank_pool.run_within(4, wrong_id, timeout=timedelta(seconds=8), limit=40.0):
        assert f"id {VOCAB} is outside the vocabulary of {VOCAB}" in text


def wrapped(fabric: Fabric, how: str) -> str:
    with process_group(fabric):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        part: nn.Module = Part(fabric.rank % 2)
        data = mesh.get_group("dp")

        def wrap_and_assign() -> None:
            stage = DistributedDataParallel(part, process_group=data) if how == "before" else part
            scope = "global" if how == "global" else "pipeline"
            with_group = mesh["dp"] if how != "without dp_group" else None
            assign_owners(
                stage,
                TIE,
                group=mesh["pp"],
                layout="rows",
                dp_group=with_group,
                scope=scope,  # type: ignore[arg-type]
            )
            DistributedDataParallel(part, process_group=data)

        with pytest.raises(PiperOwnerError) as caught:
            wrap_and_assign()
        return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("before", "wrap stages after it"),
        ("without dp_group", "Give assign_owners the dp_group="),
        ("global", "layout='rows' for every tie with scope='global'"),
    ],
)
def test_a_reducer_or_an_owner_for_all_is_refused_on_every_rank(
    rank_pool: RankPool, how: str, words: str
) -> None:
    assert all(words in text for text in rank_pool.run(4, wrapped, how))


def automatic(fabric: Fabric) -> list[str]:
    with process_group(fabric):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        part = Part(fabric.rank % 2)
        scope = "global"
        own = assign_owners(part, TIE, group=mesh["pp"], layout="auto", dp_group=mesh["dp"], scope=scope)  # type: ignore[arg-type]
        opt = OwnerOptimizer(part.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        opt.prefetch(torch.tensor([-1]))  # of no use here
        opt.step()
        kept = [holder.layout.value for holder in own.plan.ties[0].holders]
        own.close()
        return kept


def test_one_owner_for_all_keeps_copies_under_auto(rank_pool: RankPool) -> None:
    assert rank_pool.run(4, automatic) == [["dense", "dense"]] * 4


def distributed_state(fabric: Fabric) -> None:
    """torch.distributed.checkpoint.state_dict, on stages one of which keeps rows, and back again."""
    with process_group(fabric):
        part = Part(fabric.rank)
        own = assign_owners(part, TIE, layout="rows")
        opt = OwnerOptimizer(part.parameters(), torch.optim.AdamW, ownership=own, lr=0.05)

        def step(seed: int) -> None:
            ids, labels = batch(seed)
            opt.prefetch(ids if fabric.rank == 0 else None)
            if fabric.rank == 0:
                part(ids).sum().backward()
            else:
                rows = torch.ones(*ids.shape, 4, dtype=torch.float64)
                nn.functional.cross_entropy(part(rows).flatten(0, 1), labels.flatten()).backward()
            opt.step()
            opt.zero_grad()

        step(0)
        options = StateDictOptions(full_state_dict=True)
        model, state = copy.deepcopy(get_state_dict(part, opt, options=options))
        assert ("head.weight" in model, "embed.weight" in model) == (fabric.rank == 1, False)
        assert not [key for key in state["state"] if key == "embed.weight"]
        step(1)
        right = {name: value.clone() for name, value in part.state_dict().items()}
        step(2)
        set_state_dict(part, opt, model_state_dict=model, optim_state_dict=state, options=options)
        own.sync()
        assert own.check()
        step(1)
        for name, value in part.state_dict().items():
            assert torch.equal(value, right[name]), name
        own.close()


def test_the_state_goes_through_torchs_distributed_checkpoint(rank_pool: RankPool) -> None:
    rank_pool.run(2, distributed_state)
