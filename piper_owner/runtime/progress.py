"""What the driver tells after each step; without ray, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from piper_owner.executor.config import RunKind

__all__ = ["OnStep", "StepProgress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgress:
    """One finished step of one run; `step` counts from 1, bytes are those of the tied sync."""

    run: RunKind
    step: int
    loss: float
    tokens_per_second: float
    tied_bytes: int


OnStep = Callable[[StepProgress], None]
