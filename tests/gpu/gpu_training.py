"""What a rank does under torchrun: trains each of the cases, and compares itself with one process.

    torchrun --nproc-per-node 2 gpu_training.py FOLDER

FOLDER has cases.json, and gets rank0.json, ..: by case, what the rank found.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from pipelines import SCHEDULES, SINGLE, SIZE, Case, Part, mean_loss, parameters_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage

import piper_owner as po
from piper_owner.frontends.torch_pipelining import attach
from piper_owner.ownership import LayoutChoice
from piper_owner.rows import RowsParameter

__all__ = ["DTYPES", "TOLERANCES", "Found", "GpuCase", "HeldCase", "start_process_group"]

STEPS: Final = 4
BAD_STEP: Final = 1
"""The step of which, under AMP, a gradient overflows: all ranks skip it."""

DTYPES: Final = ("float32", "bfloat16", "amp")

TOLERANCES: Final = {"float32": 2e-5, "bfloat16": 1e-2, "amp": 1e-3}
"""The most by which a weight may differ from one process after four steps; weights are about 0.5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCase:
    """One training run on all ranks of a call: `dp` pipelines of equal length.

    dtype: float32; bfloat16 with masters in float32; or amp, autocast with a GradScaler.
    """

    schedule: str
    dtype: str = "float32"
    layout: LayoutChoice = "dense"
    dp: int = 1
    device: str = "cuda"

    def __str__(self) -> str:
        return f"{self.schedule}-{self.dtype}-{self.layout}" + f"-dp{self.dp}" * (self.dp > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCase:
    """Two steps on a larger table of two ranks; what the allocator holds of it afterwards."""

    layout: LayoutChoice
    device: str = "cuda"

    def __str__(self) -> str:
        return f"held-{self.layout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one rank has to show: the largest difference of a weight; and what is checked beside it."""

    difference: float = math.nan
    is_equal: bool = False
    """Whether every replica is its owner's value, bit for bit."""
    tied_states: int = 0
    """Ties of which this rank has optimizer state."""
    owned: int = 0
    held_tables: float = 0.0
    """Bytes that the rank holds, in tables."""
    device: str = ""
    """Where its weights are."""
    scale: float = 1.0
    """The loss scale at the end: of 16 at first it is halved where all ranks have skipped a step."""


def start_process_group(device: str, method: str | None = None) -> torch.device:
    """The process group of torchrun's workers, or by `method`, and this one's device."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    here = torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(here)
    rank, size = (-1, -1) if method is None else (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group(
        backend, init_method=method, timeout=timedelta(seconds=60), rank=rank, world_size=size
    )
    return here


@contextmanager
def _autocast(case: GpuCase) -> Iterator[None]:
    if case.dtype != "amp":
        yield
        return
    with torch.autocast(case.device, dtype=torch.float16 if case.device == "cuda" else torch.bfloat16):
        yield


def _plain(case: GpuCase, pipeline_ranks: int) -> Case:
    return Case(schedule=case.schedule, ranks=pipeline_ranks, optimizer="sgd", microbatches=8)


def _dtype(case: GpuCase) -> torch.dtype:
    return torch.bfloat16 if case.dtype == "bfloat16" else torch.float32


_OPTIONS: Final[dict[str, Any]] = {"lr": 0.05, "momentum": 0.9}


def _scaler(case: GpuCase, kind: type[torch.amp.GradScaler]) -> torch.amp.GradScaler:
    return kind(case.device, enabled=case.dtype == "amp", init_scale=16.0)


def _overflow(case: GpuCase, step: int) -> float:
    return math.inf if case.dtype == "amp" and step == BAD_STEP else 1.0


def train_case(case: GpuCase, here: torch.device) -> Found:
    """One rank of `case`, over all ranks of the process group."""
    mesh = init_device_mesh(
        case.device, (case.dp, dist.get_world_size() // case.dp), mesh_dim_names=("dp", "pp")
    )
    plain = _plain(case, mesh["pp"].size())
    rank = mesh.get_local_rank("pp")
    modules: list[nn.Module] = [
        Part(plain.model, stage, plain.num_stages).to(here, _dtype(case)) for stage in plain.stages_of(rank)
    ]
    stages = [
        PipelineStage(module, stage, plain.num_stages, here, group=mesh.get_group("pp"))
        for module, stage in zip(modules, plain.stages_of(rank), strict=True)
    ]
    scaler = _scaler(case, po.GradScaler)
    scales = [1.0]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return scaler.scale(mean_loss(logits.float(), labels) * scales[0])

    schedule = _made_schedule(plain, stages, loss)
    with ExitStack() as stack:
        own = po.assign_owners(
            stages,
            po.find_ties(plain.model),
            group=mesh["pp"],
            dp_group=mesh["dp"] if case.dp > 1 else None,
            layout=case.layout,
        )
        stack.callback(own.close)
        opt = po.OwnerOptimizer(
            parameters_of(modules),
            torch.optim.SGD,
            ownership=own,
            master_dtype=torch.float32 if case.dtype == "bfloat16" else None,
            **_OPTIONS,
        )
        attach(schedule, opt)
        tied = {id(tie.parameter) for tie in own.exchange.tied.values()}
        for step in range(STEPS):
            ids, labels = plain.batch(step, mesh.get_local_rank("dp"))
            opt.prefetch(ids if stages[0].is_first else None)
            scales[0] = _overflow(case, step)
            with _autocast(case):
                first = [ids.to(here)] * stages[0].is_first
                schedule.step(*first, target=labels.to(here), return_outputs=False)
            if case.dp > 1:
                _average([p for p in parameters_of(modules) if id(p) not in tied], mesh)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        return Found(
            difference=_difference(modules, _alone(case, plain, here)),
            is_equal=own.check(),
            tied_states=sum(bool(opt.state.get(tie.parameter)) for tie in own.exchange.tied.values()),
            owned=sum(own.owns(tie) for tie in own.plan.ties),
            device=str(next(modules[0].parameters()).device),
            scale=scaler.get_scale(),
        )


def _made_schedule(plain: Case, stages: list[PipelineStage], loss: Callable[[Tensor, Tensor], Tensor]) -> Any:  # noqa: ANN401
    kind: Any = SCHEDULES[plain.schedule]
    given = stages[0] if kind in SINGLE else stages
    return kind(given, plain.microbatches, loss_fn=loss, scale_grads=True)


def _average(parameters: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
    """What DistributedDataParallel does, for parameters that are in no tie."""
    for parameter in parameters:
        if parameter.grad is not None:
            total = parameter.grad.float()
            dist.all_reduce(total, group=mesh.get_group("dp"))
            parameter.grad = (total / mesh["dp"].size()).to(parameter.dtype)


def _alone(case: GpuCase, plain: Case, here: torch.device) -> dict[str, Tensor]:
    """The weights of one process on the same device, with torch's own scaler, and masters by hand."""
    model = plain.model.to(here, _dtype(case))
    parameters = list(model.parameters())
    masters = [nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in parameters]
    optimizer = torch.optim.SGD(masters, **_OPTIONS)
    scaler = _scaler(case, torch.amp.GradScaler)
    for step in range(STEPS):
        for pipeline in range(case.dp):
            ids, labels = (each.to(here) for each in plain.batch(step, pipeline))
            for start in range(0, len(ids), SIZE):
                with _autocast(case):
                    logits = model(ids[start : start + SIZE])
                share = mean_loss(logits.float(), labels[start : start + SIZE]) * _overflow(case, step)
                scaler.scale(share / plain.microbatches / case.dp).backward()
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    return {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}


def _difference(modules: Sequence[nn.Module], expected: dict[str, Tensor]) -> float:
    return max(
        float((value.detach().float() - expected[name].float()).abs().max())
        for module in modules
        for name, value in module.named_parameters()
        if not isinstance(value, RowsParameter)
    )


# -- memory

_ROWS, _COLUMNS, _LOOKED_UP = 200_000, 64, 100


def hold(case: HeldCase, here: torch.device) -> Found:
    """A table on two ranks, looked up on rank 0 and used whole on rank 1; what each holds of it."""
    before = _held_bytes(here)
    rank = dist.get_rank()
    module = nn.ModuleDict()
    if rank == 0:
        module["embed"] = nn.Embedding(_ROWS, _COLUMNS)
    else:
        module["head"] = nn.Linear(_COLUMNS, _ROWS, bias=False)
    nn.init.ones_(module.get_parameter(("embed.weight", "head.weight")[rank]))
    module.to(here)
    own = po.assign_owners(module, [("embed.weight", "head.weight")], layout=case.layout, owner=1)
    opt = po.OwnerOptimizer(module.parameters(), torch.optim.Adam, ownership=own, lr=0.1)
    for _ in range(2):
        ids = torch.arange(_LOOKED_UP)
        opt.prefetch(ids if rank == 0 else None)
        if rank == 0:
            module["embed"](ids.to(here)).sum().backward()
        else:
            module["head"](torch.ones(1, _COLUMNS, device=here)).sum().backward()
        opt.step()
        opt.zero_grad()
    held = _held_bytes(here) - before
    is_equal = own.check()
    own.close()
    return Found(is_equal=is_equal, held_tables=held / (4 * _ROWS * _COLUMNS), device=str(here))


def _held_bytes(here: torch.device) -> int:
    """Bytes of live tensors: as CUDA's allocator counts them, or those that Python knows on a CPU."""
    gc.collect()
    if here.type == "cuda":
        torch.cuda.synchronize(here)
        return torch.cuda.memory_allocated(here)
    found = [
        each for each in gc.get_objects() if isinstance(each, Tensor) and type(each) is not RowsParameter
    ]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}
    return sum(storages.values())


# -- a rank that dies


def lose_a_rank(folder: Path, device: str) -> None:
    """Two ranks train a tie, until rank 1 kills itself; rank 0 writes what it is told, and when."""
    rank = int(os.environ["RANK"])
    here = start_process_group(device, f"file://{folder}/store")
    name = ("embed.weight", "head.weight")[rank]
    module = nn.ModuleDict({name.partition(".")[0]: nn.Linear(4, 8, bias=False)}).to(here)
    nn.init.ones_(module.get_parameter(name))
    own = po.assign_owners(module, [("embed.weight", "head.weight")], timeout=timedelta(seconds=20))
    opt = po.OwnerOptimizer(module.parameters(), torch.optim.Adam, ownership=own, lr=0.1)
    for step in range(STEPS):
        module.get_parameter(name).pow(2).sum().backward()
        if (rank, step) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            opt.step()
        except po.ExchangeError as error:
            (folder / "told").write_text(f"step {step}: {type(error).__name__}: {error}")
            os._exit(0)  # not through the process group, which waits for the dead
        opt.zero_grad()


def main(folder: Path) -> None:
    """Run every case of `folder`, and write what this rank found."""
    cases = json.loads((folder / "cases.json").read_text())
    here = start_process_group(cases[0]["device"])
    found: dict[str, Any] = {}
    for options in cases:
        case = GpuCase(**options) if "schedule" in options else HeldCase(**options)
        result = train_case(case, here) if isinstance(case, GpuCase) else hold(case, here)
        found[str(case)] = asdict(result)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        lose_a_rank(Path(sys.argv[1]), sys.argv[2])
    else:
        main(Path(sys.argv[1]))
