"""Language models with a tied head, each defined once and built whole or stage by stage."""

from __future__ import annotations

from piper_owner.models.gpt import (
    TIE,
    GPTConfig,
    GPTStage,
    build_model,
    build_stage,
    lm_loss,
    split_layers,
)

__all__ = ["TIE", "GPTConfig", "GPTStage", "build_model", "build_stage", "lm_loss", "split_layers"]
