"""What the driver tells after each step and at a restart; without ray, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from piper_owner.executor.config import RunKind
from piper_owner.executor.results import Restart

__all__ = ["OnRestart", "OnStep", "OnStop", "StepProgress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgress:
    """One finished step of one run; `step` counts from 1, bytes are those of the tied sync.

    After a restart the steps that were lost come once more.
    """

    run: RunKind
    step: int
    loss: float
    tokens_per_second: float
    tied_bytes: int


OnStep = Callable[[StepProgress], None]
OnRestart = Callable[[Restart], None]
OnStop = Callable[[int], None]
"""Told the last step that is still taken, when a run is to be saved and to end."""
