"""Pipelines side by side, each with an owner of its own, and stages in DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from owners import NAMES, TIE, near, process_group
from tiny import one_torch_thread
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from piper_owner.assignment import assign_owners
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.ownership import OwnerChoice
from piper_owner.transport import Fabric

if TYPE_CHECKING:
    from ranks import RankPool


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


class Scaled(nn.Module):
    """Its weight's gradient is `factor`, whatever the shape; with a weight of its own beside."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        path, _, leaf = name.partition(".")
        self.add_module(path, nn.Module())
        self.get_submodule(path).register_parameter(
            leaf, nn.Parameter(torch.ones(shape, dtype=torch.float64))
        )
        self.own = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.name = name

    def forward(self, factor: Tensor) -> Tensor:
        return (self.get_parameter(self.name) * factor).sum() + self.own * factor


# The gradients of case 4, by (pipeline, stage).
GRADS = {(0, 0): 1.0, (1, 0): 2.0, (0, 1): 3.0, (1, 1): 4.0}


def mesh_of_four() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))


def four_ranks(
    fabric: Fabric, shape: tuple[int, ...], *, summed: bool, wrap_first: bool, owner: OwnerChoice, steps: int
) -> dict[str, Any]:
    """DP 2 x PP 2: every stage in DDP over its data parallel group, an owner in each pipeline."""
    with process_group(fabric):
        mesh = mesh_of_four()
        pipeline, stage = divmod(fabric.rank, 2)
        name = NAMES[stage]
        inner = Scaled(name, shape)
        data = mesh.get_group("dp")
        stages: nn.Module = inner
        if wrap_first:
            stages = DistributedDataParallel(inner, process_group=data)
        own = assign_owners(stages, TIE, group=mesh["pp"], owner=owner)
        wrapped = stages if wrap_first else DistributedDataParallel(inner, process_group=data)
        opt = OwnerOptimizer(wrapped.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        norms = []
        for _ in range(steps):
            factor = torch.tensor(GRADS[pipeline, stage] * (2 if summed else 1), dtype=torch.float64)
            wrapped(factor).backward()
            norms.append(float(opt.clip_grad_norm_(1e9)))
            opt.step()
            opt.zero_grad()
            assert own.check()
        weight = inner.get_parameter(name)
        assert bool((weight == weight.flatten()[0]).all())
        found = {
            "weight": float(weight.detach().flatten()[0]),
            "own": inner.own.item(),
            "norms": norms,
            "names": own.plan.ties[0].tie.names,
            "state": sum(len(group["params"]) for group in opt.param_groups),
        }
        own.close()
        return found


@pytest.mark.parametrize("shape", [(), (5, 2), (4,)], ids=str)
@pytest.mark.parametrize(("summed", "grad"), [(True, 10.0), (False, 5.0)])
def test_case_04_two_pipelines_of_two_stages(
    rank_pool: RankPool, shape: tuple[int, ...], summed: bool, grad: float
) -> None:
    """(5, 2): a vocabulary that 2 does not divide."""
    arguments = {"summed": summed, "wrap_first": False, "owner": "auto", "steps": 1}
    found = rank_pool.run(4, four_ranks, shape, **arguments)  # type: ignore[arg-type]
    assert [each["weight"] for each in found] == [near(1 - 0.1 * grad)] * 4
    # Gradients of stages' own weights are averaged as DDP does it: 1.5 and 3.5 over the two.
    factor = 2.0 if summed else 1.0
    local = [1 - 0.1 * 1.5 * factor, 1 - 0.1 * 3.5 * factor]
    assert [each["own"] for each in found] == near(local * 2)
    numel = torch.empty(shape).numel()
    norm = (grad**2 * numel + (1.5 * factor) ** 2 + (3.5 * factor) ** 2) ** 0.5
    assert [each["norms"] for each in found] == [near([norm])] * 4
    assert [each["names"] for each in found] == [NAMES] * 4
    assert [each["state"] for each in found] == [2, 1, 2, 1]


@pytest.mark.parametrize(("wrap_first", "owner"), [(True, "auto"), (False, "last"), (True, 1)])
def test_case_04_three_steps_whoever_owns_and_whatever_is_first(
    rank_pool: RankPool, wrap_first: bool, owner: str | int
) -> None:
    arguments = {"summed": False, "wrap_first": wrap_first, "owner": owner, "steps": 3}
    found = rank_pool.run(4, four_ranks, (5, 2), **arguments)  # type: ignore[arg-type]
    assert [each["weight"] for each in found] == [near(1 - 3 * 0.5)] * 4
    assert [each["names"] for each in found] == [NAMES] * 4


def accumulating(fabric: Fabric, microbatches: int) -> tuple[float, int]:
    """All but the last backward under the `no_sync` of both."""
    with process_group(fabric):
        mesh = mesh_of_four()
        pipeline, stage = divmod(fabric.rank, 2)
        inner = Scaled(NAMES[stage], (3,))
        own = assign_owners(inner, TIE, group=mesh["pp"])
        wrapped = DistributedDataParallel(inner, process_group=mesh.get_group("dp"))
        opt = OwnerOptimizer(wrapped.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        factor = torch.tensor(GRADS[pipeline, stage] / microbatches, dtype=torch.float64)
        with wrapped.no_sync(), opt.no_sync():
            for _ in range(microbatches - 1):
                wrapped(factor).backward()
        wrapped(factor).backward()
        opt.step()
        assert own.check()
        own.close()
        sent = opt.stats.sent
        return float(inner.get_parameter(NAMES[stage]).detach()[0]), sent.grads + sent.weights


@pytest.mark.parametrize("microbatches", [1, 4])
def test_case_06_gradient_accumulation_in_ddp(rank_pool: RankPool, microbatches: int) -> None:
    assert rank_pool.run(4, accumulating, microbatches) == [(near(0.5), 3 * 8)] * 4


def norm_over_groups(fabric: Fabric, kind: float) -> tuple[float, float]:
    """The two pipelines hold different shards, as under tensor parallelism: their norms add up."""
    with process_group(fabric):
        mesh = mesh_of_four()
        pipeline, stage = divmod(fabric.rank, 2)
        module = Scaled(NAMES[stage], (1,))
        module.own.requires_grad_(False)
        own = assign_owners(module, TIE, group=mesh["pp"])
        opt = OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        # Combined: 5 in the first pipeline, 12 in the second.
        factor = ((2.0, 3.0), (4.0, 8.0))[pipeline][stage]
        module(torch.tensor(factor, dtype=torch.float64)).backward()
        norm = float(opt.clip_grad_norm_(1.0, kind, groups=[mesh.get_group("dp")]))
        opt.step()
        value = module.get_parameter(NAMES[stage]).item()
        own.close()
        return norm, value


@pytest.mark.parametrize(("kind", "norm"), [(2.0, 13.0), (float("inf"), 12.0)])
def test_case_24_the_norm_over_further_groups(rank_pool: RankPool, kind: float, norm: float) -> None:
    values = [1 - 0.1 * 5 / norm] * 2 + [1 - 0.1 * 12 / norm] * 2
    found = rank_pool.run(4, norm_over_groups, kind)
    assert found == [(norm, near(value, 1e-6)) for value in values]
