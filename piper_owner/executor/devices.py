"""The device of a rank: which one it is, and when its work is done."""

from __future__ import annotations

import math

import torch

from piper_owner.errors import ConfigError
from piper_owner.executor.config import TrainConfig

__all__ = ["check_gpus", "check_local_gpus", "finish_work", "rank_device"]


def rank_device(config: TrainConfig) -> torch.device:
    """The CPU, or the first GPU that this process sees: whoever starts a rank shows it its own."""
    return torch.device("cpu") if config.device == "cpu" else torch.device(config.device, 0)


def finish_work(device: torch.device) -> None:
    """Wait until `device` has done what was started on it, so that a clock read now is right. Local."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_local_gpus(num_ranks: int, share: float) -> None:
    """`check_gpus` of those that CUDA_VISIBLE_DEVICES lets this process use. Local; starts nothing."""
    if share:
        check_gpus(num_ranks, share, available=torch.cuda.device_count(), where="this machine")


def check_gpus(num_ranks: int, share: float, *, available: int, where: str) -> None:
    """Raise ConfigError unless `available` GPUs are enough for `num_ranks` that take `share` (0 to 1) each.

    A share is of one GPU: of 0.6 only one fits. `where` is who has the GPUs, in words. Pure.
    """
    needed = math.ceil(num_ranks / math.floor(1 / share + 1e-9)) if share else 0
    if available >= needed:
        return
    need = f"{num_ranks} rank{'s need' if num_ranks > 1 else ' needs'} {needed} GPU{'s' * (needed > 1)}"
    each = "one for each rank" if share == 1 else f"{share:g} for each rank"
    has = f"{available or 'no'} GPU{'s' * (available > 1)}"
    raise ConfigError(
        f"--device cuda: {need} ({each}), and {where} has {has}; use --device cpu, fewer --devices, a "
        "smaller --gpus-per-rank, or show more of them (CUDA_VISIBLE_DEVICES)"
    )
