"""Ties in pipelines side by side with the process groups of a user, and DistributedDataParallel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from owners import NAMES, TIE, Weights, add_grad, near, process_group
from ranks import RankFailures
from tiny import one_torch_thread
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from piper_owner.assignment import assign_owners
from piper_owner.errors import ExchangeError, PiperOwnerError
from piper_owner.frontends.torch_pipelining import attach
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.transport import Fabric

if TYPE_CHECKING:
    from ranks import RankPool

SCOPES = ("pipeline", "global")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


class Part(nn.Module):
    """Half of a small language model with one table."""

    def __init__(self, stage: int, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        table, inner = torch.randn(vocabulary, 4), nn.Linear(4, 4)
        self.add_module("embed" if stage == 0 else "head", nn.Embedding(vocabulary, 4, _weight=table))
        self.add_module("first" if stage == 0 else "second", inner)
        self.stage = stage
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.stage == 0:
            return torch.tanh(self.first(self.embed(x)))  # type: ignore[operator]
        return self.second(x) @ self.head.weight.t()  # type: ignore[no-any-return, operator, union-attr]


def ids_of(step: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """A batch of six sequences, which two and three pipelines share evenly."""
    made = torch.Generator().manual_seed(step)
    ids = torch.randint(0, vocabulary, (6, 5), generator=made)
    return ids, (ids + 1) % vocabulary


def pipeline_of_two(fabric: Fabric, scope: str, vocabulary: int, dp: int, wrap: str) -> dict[str, Tensor]:
    """Five AdamW steps; other parameters, and if wrapped before the tied one too, are averaged by DDP."""
    with process_group(fabric):
        mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "pp"))
        index, stage = divmod(fabric.rank, 2)
        part: nn.Module = Part(stage, vocabulary)
        data, pipeline = mesh.get_group("dp"), mesh.get_group("pp")
        inner = part
        if wrap == "before":
            part = DistributedDataParallel(part, process_group=data)
        own = assign_owners(part, TIE, group=mesh["pp"], scope=scope, dp_group=mesh["dp"])  # type: ignore[arg-type]
        if wrap == "after":
            part = DistributedDataParallel(part, process_group=data)
            assert NAMES[stage] in part.parameters_to_ignore
        assert own.exchange.tied[NAMES[0]].is_averaged == (wrap == "before")
        opt = OwnerOptimizer(part.parameters(), torch.optim.AdamW, ownership=own, lr=0.05)
        for step in range(5):
            ids, labels = (each.chunk(dp)[index] for each in ids_of(step, vocabulary))
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
            norm = opt.clip_grad_norm_(0.5)
            opt.step()
            opt.zero_grad()
        assert own.check()
        found = {name: value.detach().clone() for name, value in inner.named_parameters()}
        states = sum(len(group["params"]) for group in opt.param_groups)
        own.close()
        return {**found, "norm": norm, "states": torch.tensor(states)}


def one_process(vocabulary: int) -> dict[str, Tensor]:
    first, second = Part(0, vocabulary), Part(1, vocabulary)
    second.head.weight = first.embed.weight  # type: ignore[union-attr]
    parameters = {**dict(second.named_parameters()), **dict(first.named_parameters())}
    unique = list({id(p): p for p in parameters.values()}.values())
    reference = torch.optim.AdamW(unique, lr=0.05)
    for step in range(5):
        ids, labels = ids_of(step, vocabulary)
        nn.functional.cross_entropy(second(first(ids)).flatten(0, 1), labels.flatten()).backward()
        norm = nn.utils.clip_grad_norm_(unique, 0.5)
        reference.step()
        reference.zero_grad()
    return {**{name: p.detach() for name, p in parameters.items()}, "norm": norm}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("vocabulary", "dp", "wrap"), [(8, 2, "after"), (7, 3, "after"), (7, 3, "before")])
def test_five_steps_with_ddp_are_one_process(
    rank_pool: RankPool, scope: str, vocabulary: int, dp: int, wrap: str
) -> None:
    right = one_process(vocabulary)
    for rank, found in enumerate(rank_pool.run(2 * dp, pipeline_of_two, scope, vocabulary, dp, wrap)):
        owns = rank % 2 == 0 and (scope == "pipeline" or rank == 0)
        assert int(found.pop("states")) == 2 + owns
        for name, value in found.items():
            assert torch.allclose(value, right[name], rtol=0, atol=1e-10), name


def scheduled(fabric: Fabric, scope: str) -> dict[str, Tensor]:
    """A schedule of torch with `attach`: with one owner for all, gradients leave only in the step."""
    with process_group(fabric):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        index, place = divmod(fabric.rank, 2)
        part = Part(place, 8)
        stage = PipelineStage(part, place, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        own = assign_owners(stage, TIE, group=mesh["pp"], scope=scope, dp_group=mesh["dp"])  # type: ignore[arg-type]
        stage.submod = DistributedDataParallel(part, process_group=mesh.get_group("dp"))
        opt = OwnerOptimizer(part.parameters(), torch.optim.AdamW, ownership=own, lr=0.05)

        def loss(out: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())

        schedule = Schedule1F1B(stage, 3, loss_fn=loss)
        attach(schedule, opt)
        for step in range(5):
            ids, labels = (each.chunk(2)[index] for each in ids_of(step, 8))
            schedule.step(ids) if place == 0 else schedule.step(target=labels)
            norm = opt.clip_grad_norm_(0.5)
            opt.step()
            opt.zero_grad()
        assert own.check()
        own.close()
        return {**{name: p.detach().clone() for name, p in part.named_parameters()}, "norm": norm}


@pytest.mark.parametrize("scope", SCOPES)
def test_five_steps_under_a_schedule_of_torch(rank_pool: RankPool, scope: str) -> None:
    right = one_process(8)
    for found in rank_pool.run(4, scheduled, scope):
        for name, value in found.items():
            assert torch.allclose(value, right[name], rtol=0, atol=1e-10), name


def sharded(fabric: Fabric) -> str:
    with process_group(fabric):
        # Names of its own: torch keeps what it knows of an equal mesh, and a process of the pool may have
        # been another rank of that before one was killed.
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
        part = Part(fabric.rank % 2, 8)
        fully_shard(part, mesh=mesh["data"])
        with pytest.raises(PiperOwnerError) as caught:
            assign_owners(part, TIE, group=mesh["pipe"], dp_group=mesh["data"])
        return str(caught.value)


def test_a_sharded_tie_is_averaged_already(rank_pool: RankPool) -> None:
    found = rank_pool.run(4, sharded)
    assert all("embed.weight" in text and "leave dp_group out" in text for text in found), found


def norm_over_pipelines(fabric: Fabric, scope: str) -> tuple[float, float]:
    """No stage is in DDP: the other weights are shards, and the tie counts once over all."""
    with process_group(fabric):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        index, stage = divmod(fabric.rank, 2)
        module = Weights({NAMES[stage]: 1.0, "own.weight": 0.0})
        own = assign_owners(module, TIE, group=mesh["pp"], scope=scope, dp_group=mesh["dp"])  # type: ignore[arg-type]
        opt = OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        add_grad(module.get_parameter(NAMES[stage]), 1.0 + index + 2 * stage)
        add_grad(module.get_parameter("own.weight"), 6.0)
        norm = float(opt.clip_grad_norm_(1.0, groups=[mesh.get_group("dp")]))
        opt.step()
        assert own.check()
        own.close()
        return norm, module.get_parameter(NAMES[stage]).item()


@pytest.mark.parametrize("scope", SCOPES)
def test_case_24_with_the_data_parallel_group_among_groups(rank_pool: RankPool, scope: str) -> None:
    """5 and four times 6."""
    found = rank_pool.run(4, norm_over_pipelines, scope)
    assert found == [(near(13.0), near(1 - 0.5 / 13, 1e-6))] * 4


def wrong_groups(fabric: Fabric, case: str) -> str:
    with process_group(fabric):
        layout = [[0, 1], [2, 3]]
        pipelines = [dist.new_group(ranks) for ranks in layout]
        crossed = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2], [2, 0], [3, 1])]
        sides = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        rank = fabric.rank
        group = pipelines[rank // 2]
        dp_group: Any = {
            "crossed": crossed[0 if rank in (0, 3) else 1],
            "the pipeline": group,
            "another's": sides[rank % 2] if rank != 3 else sides[0],
            "none": None,
            "one of two": None if rank == 1 else sides[rank % 2],
        }[case]
        module = Weights({NAMES[rank % 2]: 1.0})
        message = ""
        try:
            assign_owners(
                module, TIE, group=group, scope="global", dp_group=dp_group, timeout=timedelta(seconds=3)
            )
        except PiperOwnerError as error:
            message = f"{type(error).__name__}: {error}"
        return message


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("crossed", "dp_group"),
        ("the pipeline", "*other* pipelines"),
        ("another's", "is not in the dp_group="),
        ("none", "needs dp_group"),
        ("one of two", "dp_group is missing on the ranks [1]"),
    ],
)
def test_wrong_groups_are_an_error_on_every_rank(rank_pool: RankPool, case: str, words: str) -> None:
    found = rank_pool.run(4, wrong_groups, case)
    assert all(found), found
    # A rank whose partner has no such group cannot be told by it; it runs out of time.
    told = [text for text in found if "PeerTimeoutError" not in text]
    assert len(told) >= 3, found
    assert all(words in text for text in told), found


def dies(fabric: Fabric, scope: str, method: str) -> str:
    with process_group(fabric):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        module = Weights({NAMES[fabric.rank % 2]: torch.ones(9, 4)})
        wait = timedelta(seconds=8)
        own = assign_owners(module, TIE, group=mesh["pp"], scope=scope, dp_group=mesh["dp"], timeout=wait)  # type: ignore[arg-type]
        opt = OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        if fabric.rank == 2:
            setattr(own.exchange.side, method, lambda *_, **__: os._exit(3))
        add_grad(next(module.parameters()), 1.0)
        opt.step()
        own.check()
        return "went on"


@pytest.mark.parametrize(
    ("scope", "method"), [("global", "reduce_grad"), ("global", "spread_weight"), ("pipeline", "average")]
)
def test_case_44_a_killed_rank(rank_pool: RankPool, scope: str, method: str) -> None:
    with pytest.raises(RankFailures) as caught:
        rank_pool.run_within(4, dies, (scope, method), timeout=timedelta(seconds=8), limit=50.0)
    failures = caught.value.failures
    assert failures[2].kind == "ProcessDied"
    assert sorted(failures) == [0, 1, 2, 3]
    assert "embed.weight" in failures[0].text
    assert "pipelines 0 to 1, step 0" in failures[0].text
    assert all(isinstance(failures[rank].error, ExchangeError) for rank in (0, 1, 3))
