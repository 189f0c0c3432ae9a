"""What a user hands over as the stages of this rank, and the names of the parameters in them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.pipelining.stage import _PipelineStageBase

from piper_owner.errors import ConfigError
from piper_owner.rows import RowsParameter

__all__ = [
    "WRAPPERS",
    "NameMap",
    "Stage",
    "full_name",
    "listed_stages",
    "named_places",
    "numbered_stages",
    "refuse_pending_backwards",
    "refuse_scaled_twice",
    "refuse_unscaled",
    "scale_shared_once",
]

Stage = nn.Module | _PipelineStageBase
"""A module, or a stage of torch.distributed.pipelining."""

NameMap = Mapping[str, str] | Callable[[str], str]
"""From a parameter's name in its stage to its name in the full model."""

WRAPPERS: Final = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})
"""Name parts that DDP, torch.compile and activation checkpointing put in front of what they wrap."""


def full_name(name: str, names: NameMap | None = None) -> str:
    """`name` without the wrappers' parts, and mapped by `names` where that knows it."""
    bare = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    if names is None:
        return bare
    found: object = names(bare) if callable(names) else names.get(bare, bare)
    if not isinstance(found, str) or not found:
        raise ConfigError(f"names= gives {found!r} for {bare!r}; give the name in the full model, a string")
    return found


def named_places(stage: nn.Module, names: NameMap | None = None) -> Iterator[tuple[str, nn.Module, str]]:
    """(full-model name, module, attribute) of every place in `stage` that holds a parameter.

    A parameter that is reached by two names has two places.
    """
    for path, module in stage.named_modules(remove_duplicate=False):
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                yield full_name(f"{path}.{leaf}" if path else leaf, names), module, leaf


def listed_stages(stages: Stage | Iterable[Stage], rank: int) -> list[Stage]:
    """`stages` as a list. Raises ConfigError for what is neither a stage nor holds any."""
    if isinstance(stages, nn.Module | _PipelineStageBase):
        return [stages]
    given: object = stages
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ConfigError(
            f"stages on rank {rank} is a {type(given).__name__}: give the stage's module, its PipelineStage, "
            "a list of them, or [] on a rank that has none"
        )
    return list(given)


def numbered_stages(listed: Sequence[Stage], *, rank: int, world_size: int) -> dict[int, nn.Module]:
    """This rank's modules by stage number, ascending.

    A PipelineStage knows its number. The i-th plain module of rank r is taken for stage
    `i * world_size + r`, as in an interleaved placement; the numbers decide the order of stages,
    nothing else. A ModuleList is one stage.

    Raises ConfigError for anything else, and for a stage number twice.
    """
    numbered: dict[int, nn.Module] = {}
    for index, stage in enumerate(listed):
        if isinstance(stage, _PipelineStageBase):
            number, module = stage.stage_index, stage.submod
        elif isinstance(stage, nn.Module):
            number, module = index * world_size + rank, stage
        else:
            raise ConfigError(
                f"stages[{index}] on rank {rank} is a {type(stage).__name__}: give the stage's module, its "
                "PipelineStage, or a list of them"
            )
        if number in numbered:
            raise ConfigError(f"rank {rank} was given stage {number} twice")
        numbered[number] = module
    return dict(sorted(numbered.items()))


def scale_shared_once(stages: Sequence[_PipelineStageBase]) -> None:
    """Let the stages of one rank scale the gradient of a Parameter that they share once, not each.

    A torch schedule with `scale_grads` has every stage divide the gradients of all its
    parameters by the number of microbatches when the stage's last backward is done. A Parameter in
    two stages would be divided twice, the first time while it still accumulates. After this call
    it is divided once, when the last of its stages asks. Calling it again changes nothing.
    """
    holders: dict[int, set[int]] = {}
    for number, stage in enumerate(stages):
        for parameter in stage.submod.parameters():
            holders.setdefault(_key(parameter), set()).add(number)
    shared = {key: numbers for key, numbers in holders.items() if len(numbers) > 1}
    if not shared:
        return
    asked: dict[int, set[int]] = {key: set() for key in shared}
    for number, stage in enumerate(stages):
        if any(number in numbers for numbers in shared.values()):
            # An attribute of this one stage object: torch's classes stay as they are.
            stage.scale_grads = _Scaler(stage, number, shared, asked)  # type: ignore[method-assign]


def _key(parameter: nn.Parameter) -> int:
    """What tells parameters apart, also after a table of rows has grown into another one."""
    return id(parameter.table if isinstance(parameter, RowsParameter) else parameter)


def refuse_scaled_twice(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ConfigError if a schedule of torch has scaled the gradient of one of `parameters` twice. Local.

    It looks through the objects of the process for schedules that have run a backward with
    `scale_grads` over two stages that share the parameter, without `scale_shared_once`; so it takes
    a fraction of a second, and does not find a schedule that is not torch's own.
    """
    if not parameters:
        return
    # By type alone: `isinstance` would wake proxies and lazy modules.
    found = [thing for thing in gc.get_objects() if PipelineScheduleMulti in type(thing).__mro__]
    for schedule in found:
        if not (
            schedule.scale_grads and schedule._n_microbatches > 1 and schedule._stages_backward_initialized
        ):
            continue
        for name, parameter in parameters.items():
            stages = [
                stage
                for stage in schedule._stages
                if not isinstance(stage.scale_grads, _Scaler)
                and any(each is parameter for each in stage.submod.parameters())
            ]
            if len(stages) > 1:
                raise ConfigError(
                    f"tie {name!r}: {type(schedule).__name__} has divided its gradient by the "
                    f"{schedule._n_microbatches} microbatches once for each of the stages "
                    f"{[stage.stage_index for stage in stages]}, which share it on this rank. Call "
                    "piper_owner.frontends.torch_pipelining.attach(schedule, opt), or give assign_owners the "
                    "PipelineStages and not their modules, or make the schedule with scale_grads=False"
                )


def refuse_pending_backwards(stages: Sequence[_PipelineStageBase], rank: int) -> None:
    """Raise ConfigError if a backward of `stages` has done its input half and not its weight half. Local."""
    for stage in stages:
        # torch leaves placeholders in `dw_runner`, except for stages that have a builder of their own.
        pending = stage.backward_state if stage.dw_builder is None else stage.dw_runner
        if pending:
            raise ConfigError(
                f"rank {rank}: the weight-backward of microbatch {min(pending)} of stage "
                f"{stage.stage_index} is still pending, so gradients are not whole; step after it"
            )


def refuse_unscaled(
    stages: Sequence[_PipelineStageBase],
    passes: Mapping[int, int],
    is_nonzero: Callable[[torch.Tensor], bool],
) -> None:
    """Raise ConfigError if gradients of `stages` still await the division by their microbatches. Local.

    `passes`: by stage, the number of microbatches of passes that left it to a later one; `is_nonzero`
    tells whether a gradient is there: one that was zeroed is not.
    """
    for stage in stages:
        if stage.stage_index not in passes:
            continue
        grads = [parameter.grad for parameter in stage.submod.parameters()]
        if any(grad is not None and is_nonzero(grad) for grad in grads):
            raise ConfigError(
                f"stage {stage.stage_index}: every schedule.step since the last opt.step() ran in "
                "opt.no_sync(), so its gradients are sums that were never divided by the "
                f"{passes[stage.stage_index]} microbatches. Leave the last pass before opt.step() out of "
                "no_sync, also where the data ends in the middle of an accumulation"
            )


class _Scaler:
    """Takes the place of one stage's `scale_grads`."""

    def __init__(
        self,
        stage: _PipelineStageBase,
        number: int,
        shared: Mapping[int, set[int]],
        asked: dict[int, set[int]],
    ) -> None:
        self._stage, self._number, self._shared, self._asked = stage, number, shared, asked

    def __call__(self, grad_scale_factor: int) -> None:
        for parameter in self._stage.submod.parameters():
            key = _key(parameter)
            if key in self._shared:
                self._asked[key].add(self._number)
                if self._asked[key] != self._shared[key]:
                    continue
                self._asked[key].clear()
            if parameter.grad is not None and grad_scale_factor != 1:
                parameter.grad.div_(grad_scale_factor)
