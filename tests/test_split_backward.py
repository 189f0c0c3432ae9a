"""Weights that split backwards reach late or twice, under torch's zero-bubble and V schedules."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from pipelines import SCHEDULES, Case, loop, parameters_of, process_group, weights_of
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import piper_owner as po
from piper_owner.frontends.torch_pipelining import attach
from piper_owner.transport import Fabric


def pending(fabric: Fabric, case: Case) -> str:
    """A schedule that puts the weight half of one backward off until after its step."""
    with loop(fabric, case) as here:
        stage = here.stages[0]
        weight_half = stage.backward_weight_one_chunk

        def put_off(microbatch: int, last_backward: bool = False) -> None:
            if microbatch != 3:
                weight_half(microbatch, last_backward=last_backward)

        if fabric.rank == 1:
            stage.backward_weight_one_chunk = put_off  # type: ignore[assignment, method-assign]
        before = weights_of(here.modules)
        here.run()
        with pytest.raises(po.PiperOwnerError) as caught:
            here.opt.step()
        tied = {name for tie in here.own.plan.held_by(fabric.rank) for name in tie.holder(fabric.rank).names}
        assert all(torch.equal(weights_of(here.modules)[name], before[name]) for name in tied)
        return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(("attached", "modules"), [(False, False), (True, True)])
def test_a_step_while_a_weight_backward_is_pending_is_refused(
    rank_pool: RankPool, attached: bool, modules: bool
) -> None:
    """Seen on the stages, whoever of `assign_owners` and `attach` was given them."""
    case = Case(schedule="ScheduleZBVZeroBubble", ranks=2, attached=attached, modules=modules)
    first, second = rank_pool.run(2, pending, case)
    said = "the weight-backward of microbatch 3 of stage 1 is still pending"
    assert second.startswith("ConfigError")
    assert said in second
    assert "rank 1 failed first, at step 0" in first
    assert said in first


class Twice(nn.Module):
    """(x @ W) @ W: the one weight of every stage, and twice in each."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, rows: Tensor) -> Tensor:
        return (rows @ self.weight) @ self.weight


def products(fabric: Fabric, case: Case, weight: Tensor, rows: Tensor, scale: float) -> Tensor:
    with process_group(fabric):
        modules = {
            stage: nn.ModuleDict({f"s{stage}": Twice(weight)}) for stage in case.stages_of(fabric.rank)
        }
        for module in modules.values():
            module.forward = next(iter(module.values())).forward
        device = torch.device("cpu")
        stages = [PipelineStage(m, stage, case.num_stages, device) for stage, m in modules.items()]
        schedule = SCHEDULES[case.schedule](  # type: ignore[misc]
            stages,  # type: ignore[arg-type]
            n_microbatches=case.microbatches,
            loss_fn=lambda out, labels: (out * labels).sum() * scale,
            scale_grads=False,
        )
        names = tuple(f"s{stage}.weight" for stage in range(case.num_stages))
        own = po.assign_owners(stages, [names], timeout=timedelta(seconds=20))
        opt = po.OwnerOptimizer(parameters_of(list(modules.values())), torch.optim.SGD, ownership=own, lr=1.0)
        if case.attached:
            attach(schedule, opt)
        schedule.step(*[rows] * stages[0].is_first, target=rows, return_outputs=False)
        opt.step()
        assert own.check()
        tied = next(iter(own.exchange.tied.values())).parameter.detach().clone()
        own.close()
        return tied


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize(
    "name", ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"]
)
def test_a_weight_in_every_stage_and_twice_in_each_equals_autograd(
    rank_pool: RankPool, name: str, attached: bool
) -> None:
    case = Case(schedule=name, ranks=2, attached=attached, microbatches=4)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(3, 3, generator=generator, dtype=torch.float64) / 2
    rows = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    whole = nn.Parameter(weight.clone())
    out = rows
    for _ in range(2 * case.num_stages):
        out = out @ whole
    ((out * rows).sum() * 0.5).backward()
    assert whole.grad is not None
    for found in rank_pool.run(2, products, case, weight, rows, 0.5):
        assert torch.allclose(found, weight - whole.grad, rtol=0, atol=1e-10)
