"""Ties and DistributedDataParallel: who averages the gradient of a tie over the pipelines.

DDP averages a stage's gradients before the tie is combined. That is right, but it moves the gradient
of every holder, where one average of the combined gradient is enough. So a tie that is to be averaged
by its owner is kept out of the reducer of a stage that is wrapped later, and one that a reducer has
already is not averaged again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from piper_owner.errors import ConfigError
from piper_owner.sharding import is_sharded
from piper_owner.tied import TiedParameter

__all__ = ["averages", "keep_out"]


def averages(
    modules: Iterable[nn.Module], tied: Mapping[str, TiedParameter], ranks: tuple[int, ...] | None
) -> str:
    """Which of `tied` a DistributedDataParallel among `modules` averages over `ranks` of the job (None:
    any): their names as JSON, and `is_averaged` of each. Local.

    Raises ConfigError if one averages over other ranks, or if a tie is sharded.
    """
    reduced = [
        (wrapped, {id(p) for name, p in named if name not in wrapped.parameters_to_ignore})
        for wrapped in _wrapped(modules)
        for named in [list(wrapped.module.named_parameters(remove_duplicate=False))]
    ]
    for name, tie in tied.items():
        if is_sharded(tie.parameter):
            raise ConfigError(
                f"tie {name!r}: its parameter is sharded over ranks, which average its gradient already; "
                "leave dp_group out, with scope='pipeline', or the tie out of fully_shard (ignored_params=)"
            )
        for wrapped, parameters in reduced:
            if id(tie.parameter) not in parameters:
                continue
            theirs = sorted(dist.get_process_group_ranks(wrapped.process_group))
            if ranks is not None and theirs != sorted(ranks):
                raise ConfigError(
                    f"tie {name!r}: a DistributedDataParallel has its stage over the ranks {theirs}, and "
                    f"dp_group has the ranks {sorted(ranks)}; wrap it over dp_group, or after assign_owners"
                )
            tie.is_averaged = True
    return json.dumps([name for name, tie in tied.items() if tie.is_averaged])


class _Refused(list[str]):
    """What a DistributedDataParallel is to leave alone, for a module that it must not wrap."""

    def __iter__(self) -> Iterator[str]:
        raise ConfigError(
            f"DistributedDataParallel over a stage of {self[0]!r}, a tie that keeps rows only: it cannot "
            "average rows, because each pipeline looks others up. Give assign_owners the dp_group= over "
            "which it averages: the owners then average the whole gradient, once"
        )


def keep_out(module: nn.Module, parameters: Iterable[nn.Parameter], *, refuse: bool = False) -> None:
    """Let a DistributedDataParallel that wraps `module` from now on leave `parameters` alone, or `refuse`
    to be made. Local.

    What is ignored already stays so. A module with no other parameters that need a gradient is not to
    be wrapped at all: DistributedDataParallel refuses it.
    """
    unwanted = {id(parameter) for parameter in parameters}
    names = [n for n, p in module.named_parameters(remove_duplicate=False) if id(p) in unwanted]
    if not names or isinstance(module, DistributedDataParallel):
        return
    # DDP asks for a parameter of the module itself with a dot in front.
    names += [f".{name}" for name in names if "." not in name]
    before = list.copy(getattr(module, "_ddp_params_and_buffers_to_ignore", []))
    ignored = list(dict.fromkeys([*before, *names]))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    if refuse:
        module._ddp_params_and_buffers_to_ignore = _Refused(ignored)  # type: ignore[assignment]


def _wrapped(modules: Iterable[nn.Module]) -> Iterator[DistributedDataParallel]:
    for module in modules:
        for each in module.modules():
            if isinstance(each, DistributedDataParallel):
                yield each
