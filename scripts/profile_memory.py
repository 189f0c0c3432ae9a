#!/usr/bin/env python3
"""Measure what each rank keeps, without Ray: a loop of one's own under torchrun.

    torchrun --nproc-per-node 4 scripts/profile_memory.py
    scripts/profile_memory.py --stages 2 --runs dense,rows --json FILE

It trains like piper-owner memory, with the same options, tables, files and predictions, in an ordinary loop
of torch.distributed with OwnerOptimizer; under naive and all-reduce that knows of no tie, and each rank steps
its copy. Without torchrun it starts it, with a process for each stage. The model is the GPT, a stage a rank.

--master-dtype float32 keeps master weights of narrower parameters, on the ranks that step them.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

import piper_owner as po
from piper_owner.cli.memory import check_outputs, possible, read_tokens, show_steps, write_outputs
from piper_owner.cli.memory_options import MemoryOptions, add_run, read_run
from piper_owner.cli.memory_render import print_memory
from piper_owner.dag.nodes import Compute, ComputeKind, Transfer, TransferKind
from piper_owner.data.batches import Batch
from piper_owner.errors import ConfigError, InputError, PiperOwnerError
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.memory_runs import MemoryResult, collect_run, plan_method, predict_run, run_of
from piper_owner.executor.metering import StepMemory
from piper_owner.executor.optimizers import optimizer_factory
from piper_owner.executor.plan import RunPlan
from piper_owner.executor.source import GPTSource, torch_dtype
from piper_owner.executor.stream import token_stream
from piper_owner.memory import MemoryUse, TensorTracker, kept_tensors, measure, process_memory
from piper_owner.models.gpt import lm_loss
from piper_owner.ownership import TiePlan

SOURCE = GPTSource()


def main() -> int:
    """Measure, print and write; the exit status, as that of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_run(parser)
    parser.add_argument(
        "--master-dtype", choices=("float32", "float64"), help="of master weights (default: none)"
    )
    arguments = parser.parse_args()
    try:
        options = read_run(arguments)
        _check(options)
        if "RANK" not in os.environ:
            _start_torchrun(options.config.devices)
        return _measure_all(options, getattr(torch, arguments.master_dtype or "", None))
    except (PiperOwnerError, OSError) as error:
        print(f"profile_memory: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1


def _check(options: MemoryOptions) -> None:
    config = options.config
    if config.model != "gpt":
        raise ConfigError(
            f"--model {config.model}: here only gpt is trained; piper-owner memory trains others"
        )
    if config.devices != config.stages:
        raise ConfigError(f"--devices {config.devices}: here each rank has one stage; leave it out")
    world_size = int(os.environ.get("WORLD_SIZE", config.devices))
    if world_size != config.devices:
        raise ConfigError(
            f"--stages {config.stages} under {world_size} processes: give torchrun --nproc-per-node "
            f"{config.stages}"
        )
    if config.chunk_bytes != TrainConfig().chunk_bytes:
        raise ConfigError("--chunk-bytes: assign_owners takes chunks of 4 MiB; leave it out here")
    if config.schedule not in ("gpipe", "1f1b"):
        raise ConfigError(f"--schedule {config.schedule}: here backwards are whole; use gpipe or 1f1b")
    check_outputs(options)


def _start_torchrun(num_ranks: int) -> None:
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execv(sys.executable, [sys.executable, *run, *sys.argv])


def _measure_all(options: MemoryOptions, master_dtype: torch.dtype | None) -> int:
    config, is_first = options.config, os.environ["RANK"] == "0"
    notes = Console(stderr=True, highlight=False, quiet=not is_first)
    methods = possible(config, options.methods, SOURCE, notes)
    dist.init_process_group("gloo", timeout=timedelta(seconds=config.timeout_seconds))
    if is_first:  # one rank learns the vocabulary, and the others read it
        read_tokens(options, config)
    dist.barrier()
    text, tokens = read_tokens(options, config)
    stream = token_stream(config, tokens)
    runs = {}
    with show_steps(notes, config, methods) as on_step:
        for method in methods:
            plan = plan_method(config, method, SOURCE)
            rank = _Rank(plan, run_of(config, method)[0], master_dtype)
            steps = []
            for step in range(config.steps):
                steps.append(rank.measured_step(stream.batch(step)))
                on_step(method, step + 1)
            rank.close()
            gathered: list[Any] = [None] * config.devices
            dist.all_gather_object(gathered, steps)
            if is_first:
                runs[method] = collect_run(
                    plan, predict_run(plan, stream, SOURCE, master_dtype=master_dtype), gathered
                )
    if is_first:
        result = MemoryResult(config=config, where="torchrun", text=text, runs=runs)
        print_memory(result, Console(file=sys.stdout, highlight=False))
        write_outputs(options, result)
    dist.barrier()
    dist.destroy_process_group()
    return 0


class _Rank:
    """One rank's stage and its optimizer. Sends go off and are waited for at the end of a step."""

    def __init__(self, plan: RunPlan, config: TrainConfig, master_dtype: torch.dtype | None) -> None:
        self.plan, self.config, self.rank = plan, config, dist.get_rank()
        self.module = SOURCE.build_stages(config, (self.rank,))[self.rank]
        self.ties = plan.ownership.held_by(self.rank)
        is_owned = plan.run is RunKind.OWNER
        self.own = po.assign_owners(
            self.module,
            [tie.tie for tie in plan.ownership.ties] if is_owned else [],
            owner=config.owner,
            layout=config.layout,
            timeout=timedelta(seconds=config.timeout_seconds),
        )
        made = optimizer_factory(config.optimizer, config.learning_rate)
        assert isinstance(made, partial)
        options = {**made.keywords, "master_dtype": master_dtype}
        self.optimizer = po.OwnerOptimizer(self.module.parameters(), made.func, ownership=self.own, **options)
        self.groups = {
            tie.name: dist.new_group(list(tie.ranks))
            for tie in (plan.ownership.ties if plan.run is RunKind.ALLREDUCE else ())
        }
        self.entered: dict[int, Tensor] = {}
        self.left: dict[int, Tensor] = {}
        self.grads: dict[int, Tensor] = {}
        self.sent: list[tuple[dist.Work | None, Tensor]] = []
        self.most = MemoryUse()

    def measured_step(self, batch: Batch) -> StepMemory:
        """Train on `batch`, and measure when gradients are there, around the sync, and at the end."""
        self.most = self.now()
        tracker = TensorTracker(tensor for _, tensor in kept_tensors(self.module, self.optimizer))
        with tracker:
            self.step(batch)
        return StepMemory(use=self.most, peak=tracker.peak, process=process_memory())

    def now(self) -> MemoryUse:
        return measure(self.module, self.optimizer)

    def step(self, batch: Batch) -> None:
        ids, labels = torch.from_numpy(batch.ids).unbind(0), torch.from_numpy(batch.labels).unbind(0)
        self.optimizer.prefetch(*(ids if self.rank == 0 else ()))
        for action in self.plan.dag.programs[self.rank]:
            match action:
                case Compute(kind=ComputeKind.FORWARD, microbatch=index):
                    self.forward(index, ids[index], labels[index], batch.num_tokens)
                case Compute(kind=ComputeKind.BACKWARD, microbatch=index):
                    self.backward(index)
                case Transfer():
                    self.transfer(action)
                case _:
                    pass  # the optimizer steps and syncs, below
        self.most |= self.now()
        for tie in self.ties if self.groups else ():
            self.all_reduce(tie)
        self.most |= self.now()
        self.optimizer.step()
        self.most |= self.now()
        for work, _ in self.sent:
            if work is not None:
                work.wait()
        self.sent.clear()
        self.optimizer.zero_grad()
        self.most |= self.now()

    def forward(self, index: int, ids: Tensor, labels: Tensor, num_tokens: int) -> None:
        entering = ids if self.rank == 0 else self.entered[index].requires_grad_()
        out = self.module(entering)
        if self.rank == self.config.stages - 1:
            out = lm_loss(out, labels, num_tokens=num_tokens)
        self.left[index] = out

    def backward(self, index: int) -> None:
        self.left.pop(index).backward(self.grads.pop(index, None))

    def transfer(self, action: Transfer) -> None:
        index, peer = action.microbatch, action.peer
        shape = (self.config.microbatch_size, self.config.sequence_length, self.config.hidden)
        match action.kind:
            case TransferKind.SEND_ACTIVATION:
                self.send(self.left[index].detach(), peer)
            case TransferKind.SEND_INPUT_GRAD:
                grad = self.entered.pop(index).grad
                assert grad is not None
                self.send(grad, peer)
            case TransferKind.RECV_ACTIVATION:
                self.entered[index] = torch.empty(shape, dtype=torch_dtype(self.config))
                dist.recv(self.entered[index], peer)
            case TransferKind.RECV_INPUT_GRAD:
                self.grads[index] = torch.empty(shape, dtype=torch_dtype(self.config))
                dist.recv(self.grads[index], peer)

    def send(self, tensor: Tensor, peer: int) -> None:
        self.sent.append((dist.isend(tensor, peer), tensor))

    def all_reduce(self, tie: TiePlan) -> None:
        """The baseline: the sum of all copies' gradients; one element more says whether any has one."""
        for name in tie.holder(self.rank).names:
            copy = self.module.get_parameter(name)
            flat = torch.zeros(copy.numel() + 1, dtype=copy.dtype)
            if copy.grad is not None:
                flat[:-1] += copy.grad.view(-1)
                flat[-1] = 1
            dist.all_reduce(flat, group=self.groups[tie.name])
            copy.grad = flat[:-1].view_as(copy).clone()

    def close(self) -> None:
        self.own.close()


if __name__ == "__main__":
    sys.exit(main())
