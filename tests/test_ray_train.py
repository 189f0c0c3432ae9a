"""The optimizer inside Ray Train's workers, which bring a process group of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ray import cloudpickle

pytest.importorskip("pandas", reason="needs ray[train], which is not installed")
pytest.importorskip("pyarrow", reason="needs ray[train], which is not installed")

# Workers cannot import a test module, so the function below travels as it is.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]


def train_worker(config: dict[str, str]) -> None:
    """Two steps on the tied weight W = 1: gradients 1 and 2, SGD at 0.1."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import piper_owner as po

    rank = dist.get_rank()
    name = ("embed", "head")[rank]
    module = nn.ModuleDict({name: nn.Linear(1, 1, bias=False)})
    weight = module[name].weight
    nn.init.ones_(weight)  # type: ignore[arg-type]
    own = po.assign_owners(module, [("embed.weight", "head.weight")])
    opt = po.OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
    seen = []
    for _ in range(2):
        (weight * (1.0, 2.0)[rank]).sum().backward()  # type: ignore[operator, union-attr]
        opt.step()
        opt.zero_grad()
        seen.append(weight.item())  # type: ignore[operator]
    own.check()
    own.close()
    Path(config["folder"], str(rank)).write_text(" ".join(f"{value:.6f}" for value in seen))


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.filterwarnings("ignore")  # Ray Train's own
def test_it_trains_in_ray_train(tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    TorchTrainer(
        train_worker,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=str(tmp_path / "results")),
    ).fit()
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0.700000 0.400000"] * 2
