"""The `gpu` marker: which tests a machine can run, and what is missing for the others."""

from __future__ import annotations

import pytest

__all__ = ["add_option", "device_of", "skip_without_gpus", "what_is_missing"]


def add_option(parser: pytest.Parser) -> None:
    """`--gpu-device`: where the tests marked gpu run."""
    parser.addoption(
        "--gpu-device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="where the tests marked gpu run; cpu runs the same bodies on the CPU, over gloo",
    )


def device_of(config: pytest.Config) -> str:
    """The device that was chosen."""
    chosen: str = config.getoption("--gpu-device")
    return chosen


def what_is_missing(needed: int, available: int) -> str | None:
    """Why a test that needs `needed` GPUs cannot run with `available`; None if it can."""
    if available >= needed:
        return None
    if available == 0:
        return f"needs {needed} GPU{'s' * (needed > 1)}, and torch finds no CUDA device"
    return f"needs {needed} GPUs, and CUDA_VISIBLE_DEVICES shows torch {available}"


def skip_without_gpus(item: pytest.Item) -> None:
    """Skip `item`, marked `gpu(number)`, where there are fewer GPUs than that."""
    marker = item.get_closest_marker("gpu")
    if marker is None or device_of(item.config) == "cpu":
        return
    import torch

    needed: int = marker.args[0] if marker.args else 1
    missing = what_is_missing(needed, torch.cuda.device_count())
    if missing is not None:
        pytest.skip(missing)
