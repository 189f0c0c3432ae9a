"""Ties under the schedules of torch.distributed.pipelining: manual stages, and the tracer's.

    schedule = ScheduleZBVZeroBubble(stages, 8, loss_fn)
    own = piper_owner.assign_owners(stages, ties)
    opt = piper_owner.OwnerOptimizer(params, torch.optim.AdamW, ownership=own, lr=3e-4)
    attach(schedule, opt)  # optional

torch's classes stay as they are: `attach` sets attributes of the schedule and stage objects it is given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, cast

import torch
from torch.distributed.pipelining import Pipe
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _ComputationType,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from piper_owner.errors import ConfigError
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.ownership import Tie
from piper_owner.stages import scale_shared_once

__all__ = ["attach", "ties_of"]


def attach(schedule: _PipelineSchedule, opt: OwnerOptimizer) -> None:
    """Let the gradients of ties travel while `schedule` still runs. Optional, once per rank. Local.

    schedule: any single- or multi-stage schedule of torch, over this rank's stages.
    opt: lists the parameters of those stages.

    Afterwards, in each `schedule.step` with a loss:

    - a replica's gradient is sent when the last stage here that holds it has finished its
      backwards, and is None from then on; on the owner it comes in meanwhile. It costs a copy of
      the gradient on each side. The timeout of `assign_owners` then also bounds how much later
      than the owner a replica finishes its backwards.
    - a Parameter that stages of this rank share is scaled once, however `assign_owners` was given
      the stages.
    - gradients may be accumulated: put all `schedule.step` before an `opt.step()` but the last into
      `with opt.no_sync():`. With `scale_grads` each one then counts as its own mean (without
      `attach`, torch scales earlier ones again: use `scale_grads=False` there). A second one
      that is not in `no_sync` raises ConfigError, on every rank, before it computes anything; so
      does an `opt.step()` before which all of them were in `no_sync`, with `scale_grads`.

    `opt.step()` returns with the new weights, as without. On a rank that leaves `attach` out
    gradients leave in `opt.step()`. Attaching another schedule over the same stages is fine.

    Raises ConfigError for anything else than a schedule and an OwnerOptimizer; and, on every rank, for
    a schedule whose ranks receive in another order than they send, as `defer_pp_recv=True` makes of
    some: torch trains on the wrong activations there, without a word.
    """
    if not isinstance(opt, OwnerOptimizer):
        raise ConfigError(f"attach(schedule, opt): opt is a {type(opt).__name__}, not an OwnerOptimizer")
    stages = _stages_of(schedule)
    if isinstance(schedule, _PipelineScheduleRuntime):
        _refuse_swapped_receives(schedule)
    scale_shared_once(stages)
    progress = _Progress(opt)
    for stage in stages:
        if all(stage is not known for known in opt.ownership.pipeline_stages):
            opt.ownership.pipeline_stages.append(stage)
        if isinstance(stage.perform_reduce_grad, _Reducer):
            del stage.perform_reduce_grad
        stage.perform_reduce_grad = _Reducer(stage, progress)  # type: ignore[method-assign]
        for name, tie in opt.ownership.exchange.tied.items():
            if any(parameter is tie.parameter for parameter in stage.submod.parameters()):
                progress.holders.setdefault(name, set()).add(stage.stage_index)
    if isinstance(schedule.step, _Step):
        del schedule.step
    schedule.step = _Step(schedule, opt)  # type: ignore[method-assign]


def _stages_of(schedule: _PipelineSchedule) -> list[_PipelineStageBase]:
    match schedule:
        case PipelineScheduleSingle():
            return [schedule._stage]
        case PipelineScheduleMulti():
            return list(schedule._stages)
        case _:
            raise ConfigError(
                f"attach(schedule, opt): {type(schedule).__name__} is no schedule of "
                "torch.distributed.pipelining"
            )


def _refuse_swapped_receives(schedule: _PipelineScheduleRuntime) -> None:
    """Raise ConfigError if a rank receives from another in an order that is not that of the sends.

    Messages between two ranks are matched by their order alone. Every rank knows all orders, so
    all of them raise.
    """
    ranks = schedule.stage_index_to_group_rank
    sent: dict[tuple[int, int], list[str]] = defaultdict(list)
    received: dict[tuple[int, int], list[str]] = defaultdict(list)
    for rank, actions in schedule.pipeline_order_with_comms.items():
        for action in actions:
            here, kind = action.stage_index, action.computation_type
            match kind:
                case _ComputationType.SEND_F | _ComputationType.RECV_B:
                    there = here + 1
                case _ComputationType.SEND_B | _ComputationType.RECV_F:
                    there = here - 1
                case _:
                    continue
            what = "activation" if kind in (_ComputationType.SEND_F, _ComputationType.RECV_F) else "gradient"
            message = f"the {what} of microbatch {action.microbatch_index} for stage"
            if kind in (_ComputationType.SEND_F, _ComputationType.SEND_B):
                sent[rank, ranks[there]].append(f"{message} {there}")
            else:
                received[ranks[there], rank].append(f"{message} {here}")
    for sender, receiver in sorted({*sent, *received}):
        for is_sent, is_received in zip_longest(sent[sender, receiver], received[sender, receiver]):
            if is_sent != is_received:
                raise ConfigError(
                    f"{type(schedule).__name__}: rank {receiver} takes what comes from rank {sender} for "
                    f"{is_received}, but it is {is_sent}. torch matches messages of two ranks by their order "
                    "alone, so the run would be wrong without an error; make the schedule without "
                    "defer_pp_recv=True"
                )


class _Progress:
    """Which stages of this rank have finished their backwards in this step."""

    def __init__(self, opt: OwnerOptimizer) -> None:
        self.opt = opt
        self.holders: dict[str, set[int]] = {}
        self._done: set[int] = set()
        self._step = -1

    def finish(self, stage_index: int) -> None:
        """Send the gradients that are complete now."""
        step = self.opt.ownership.step
        if step != self._step:
            self._step = step
            self._done.clear()
        self._done.add(stage_index)
        self.opt.send_early({name for name, stages in self.holders.items() if stages <= self._done})


class _Reducer:
    """Takes the place of one stage's `perform_reduce_grad`.

    Every schedule calls that once for each stage, behind the stage's last backward; hooks of
    autograd do not see backwards that are split into input and weight.
    """

    def __init__(self, stage: _PipelineStageBase, progress: _Progress) -> None:
        self._reduce: Callable[[int], None] = stage.perform_reduce_grad
        self._stage = stage
        self._progress = progress

    def __call__(self, grad_scale_factor: int) -> None:
        # `schedule.eval` comes here too, and what accumulates is scaled once, with the last pass.
        stage, opt = self._stage, self._progress.opt
        if not stage.has_backward:
            self._reduce(1)
            return
        if not opt.is_syncing:
            self._reduce(1)
            if grad_scale_factor != 1:
                opt.ownership.unscaled[stage.stage_index] = grad_scale_factor
            return
        self._reduce(grad_scale_factor)
        opt.ownership.unscaled.pop(stage.stage_index, None)
        self._progress.finish(self._stage.stage_index)


class _Step:
    """Takes the place of one schedule's `step`."""

    def __init__(self, schedule: _PipelineSchedule, opt: OwnerOptimizer) -> None:
        self._schedule = schedule
        self._step: Callable[..., Any] = schedule.step
        self._opt = opt

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's own
        # `schedule.eval` comes through here too, without a backward.
        if self._schedule._has_backward and self._opt.is_syncing:
            self._opt.begin_exchange()
        return self._step(*args, **kwargs)


def ties_of(pipe: Pipe) -> tuple[Tie, ...]:
    """The ties that the tracer found in the model of `pipe`, and a clean-up of its stage modules. Local.

    Names are those of the model, as the stage modules of `pipe` keep them, so they go to
    `assign_owners` with a stage of `pipe.build_stage` or a module of `pipe.get_stage_module`. The
    first name is that of the earliest stage.

    The tracer leaves a copy of a tied parameter under its other name in a stage that does not use
    it there. Nothing would ever update it, but it would be listed in `parameters()` and saved: it
    is taken out, here, from the stage modules themselves. So call this before the parameters go
    to an optimizer.
    """
    ties = []
    for places in pipe.replicated_params:
        names = tuple(dict.fromkeys(places.values()))
        ties.append(Tie(names))
        for index in range(pipe.num_stages):
            module = pipe.get_stage_module(index)
            used = _used_paths(module)
            for name in names:
                path, _, leaf = name.rpartition(".")
                if leaf in _parameters_at(module, path) and not any(
                    name == each or name.startswith(f"{each}.") for each in used
                ):
                    delattr(module.get_submodule(path), leaf)
    return tuple(ties)


def _used_paths(module: torch.nn.Module) -> set[str]:
    """The attributes and submodules that the graph of a traced stage reads."""
    graph = cast("torch.fx.GraphModule", module).graph
    return {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}


def _parameters_at(module: torch.nn.Module, path: str) -> dict[str, torch.nn.Parameter | None]:
    try:
        return module.get_submodule(path)._parameters
    except AttributeError:
        return {}
