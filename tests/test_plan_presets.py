"""Presets against the published numbers of parameters, and shapes against real modules."""

from __future__ import annotations

import math

import pytest
import torch
from plan_cases import gpt_shapes, preset_shapes

from piper_owner.errors import ConfigError
from piper_owner.models.gpt import GPTConfig, build_stage
from piper_owner.planning.presets import PRESETS, find_preset
from piper_owner.planning.shapes import num_parameters

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "smollm-135m": 134_515_008,
    "smollm-360m": 361_821_120,
    "smollm-1.7b": 1_711_376_384,
    "olmo-1b": 1_176_764_416,
    "phi-4-mini": 3_836_021_760,
}


def test_every_preset_is_here() -> None:
    assert set(PUBLISHED) == set(PRESETS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_formula_gives_the_published_number(name: str) -> None:
    preset = PRESETS[name]
    assert num_parameters(preset.model) == preset.parameters == PUBLISHED[name]
    assert preset_shapes(name, 4).num_parameters == PUBLISHED[name]
    assert preset.source.count("/") == 1


def test_gemma_by_hand() -> None:
    attention = 2304 * (8 * 256 + 2 * 4 * 256) + 8 * 256 * 2304
    layer = attention + 3 * 2304 * 9216 + 4 * 2304
    assert PUBLISHED["gemma-2-2b"] == 26 * layer + 256_000 * 2304 + 2304


def test_an_unknown_preset_suggests_one() -> None:
    assert find_preset("GPT2") is PRESETS["gpt2"]
    with pytest.raises(ConfigError, match="did you mean gemma-2-2b"):
        find_preset("gemma2-2b")
    with pytest.raises(ConfigError, match="choose one of gpt2, ") as error:
        find_preset("?" * 10**7)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_gpt_has_the_tensors_of_its_modules(stages: int) -> None:
    config = GPTConfig(vocab_size=300, hidden=24, layers=5, heads=3, context=16)
    shapes = gpt_shapes(stages, vocab=300, hidden=24, layers=5, heads=3, context=16)
    (tied,) = shapes.ties
    for stage in range(stages):
        module = build_stage(config, stage, stages, dtype=torch.float32, device="meta")
        tensors = [tuple(p.shape) for name, p in module.named_parameters() if name not in tied.tie.names]
        assert sorted(tensors) == sorted(shapes.stages[stage].shapes)
        matrices = [p for name, p in module.named_parameters() if p.dim() == 2 and "embed" not in name]
        matrices = [p for p in matrices if tuple(p.shape) != (16, 24)]  # positions are looked up
        head = 300 * 24 if stages == 1 else 0  # where the one Parameter bears the embedding's name
        assert shapes.stages[stage].multiplies == sum(math.prod(p.shape) for p in matrices) + head
