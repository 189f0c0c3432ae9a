"""The sizes of published models whose input embedding is their output head. Pure.

Each figure is that of `config.json` of the model's page on huggingface.co, at the name in `Preset.source`:
`vocab_size`, `hidden_size` (`n_embd`), `num_hidden_layers` (`n_layer`), `intermediate_size` (`n_inner`, four
times `n_embd` by default), `num_attention_heads` (`n_head`), `num_key_value_heads`, `head_dim` (by default
the hidden size over the heads), and `tie_word_embeddings`, which is true in all of them. What a config does
not say (biases, the kind and number of normalisations, which maps are one tensor) is that of the
model's class in transformers. `Preset.parameters` is the published number of parameters, the tied table
once; it follows from the other figures.

Of the Phi models only Phi-4-mini ties: phi-1, phi-1.5, phi-2 (a head with a bias of its own) and
Phi-3-mini have two tables. Of Qwen 2.5 those of 0.5B to 3B tie, of Qwen 3 those of 0.6B to 4B, of Llama 3.2
both text models, of OLMo the 1B of the first series. Gemma 3 4B stands here without its vision tower,
with the rows that its text model has on the hub, of which the last 64 stand for images.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

from piper_owner.errors import ConfigError
from piper_owner.planning.shapes import Architecture, Norm

__all__ = ["PRESETS", "Preset", "find_preset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A published model: its sizes, its page, and how many parameters it is said to have."""

    model: Architecture
    source: str
    parameters: int


def _gpt2(source: str, hidden: int, layers: int, heads: int, parameters: int) -> Preset:
    """GPT-2: learnt positions, LayerNorm, biases everywhere, queries, keys and values in one tensor."""
    model = Architecture(
        vocab=50_257,
        hidden=hidden,
        layers=layers,
        ffn=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        gated=False,
        norm=Norm.LAYER,
        qkv_bias=True,
        bias=True,
        fused=True,
        positions=1024,
    )
    return Preset(model=model, source=source, parameters=parameters)


def _llama(source: str, parameters: int, *sizes: int) -> Preset:
    """Llama and SmolLM: RMSNorm, a gated MLP, no bias. `sizes` as the fields of Architecture come."""
    vocab, hidden, layers, ffn, heads, kv_heads, head_dim = sizes
    model = Architecture(
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    return Preset(model=model, source=source, parameters=parameters)


def _qwen(
    source: str,
    parameters: int,
    hidden: int,
    layers: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    qk_norm: bool,
) -> Preset:
    """Qwen 2.5: as Llama, with biases of queries, keys and values; Qwen 3: normalised ones instead."""
    model = Architecture(
        vocab=151_936,
        hidden=hidden,
        layers=layers,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=not qk_norm,
        qk_norm=qk_norm,
    )
    return Preset(model=model, source=source, parameters=parameters)


def _gemma(
    source: str,
    parameters: int,
    vocab: int,
    hidden: int,
    layers: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    *,
    qk_norm: bool,
) -> Preset:
    """Gemma 2 and 3: heads of 256, four normalisations in a layer; Gemma 3 normalises queries and keys."""
    model = Architecture(
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=256,
        norms=4,
        qk_norm=qk_norm,
    )
    return Preset(model=model, source=source, parameters=parameters)


_OLMO: Final = Architecture(
    vocab=50_304,
    hidden=2048,
    layers=16,
    ffn=8192,
    heads=16,
    kv_heads=16,
    head_dim=128,
    norm=Norm.PLAIN,
)
_PHI_4_MINI: Final = Architecture(
    vocab=200_064,
    hidden=3072,
    layers=32,
    ffn=8192,
    heads=24,
    kv_heads=8,
    head_dim=128,
    fused=True,
)

PRESETS: Final[dict[str, Preset]] = {
    "gpt2": _gpt2("openai-community/gpt2", 768, 12, 12, 124_439_808),
    "gpt2-medium": _gpt2("openai-community/gpt2-medium", 1024, 24, 16, 354_823_168),
    "gpt2-large": _gpt2("openai-community/gpt2-large", 1280, 36, 20, 774_030_080),
    "gpt2-xl": _gpt2("openai-community/gpt2-xl", 1600, 48, 25, 1_557_611_200),
    "llama-3.2-1b": _llama("meta-llama/Llama-3.2-1B", 1_235_814_400, 128_256, 2048, 16, 8192, 32, 8, 64),
    "llama-3.2-3b": _llama("meta-llama/Llama-3.2-3B", 3_212_749_824, 128_256, 3072, 28, 8192, 24, 8, 128),
    "qwen2.5-0.5b": _qwen("Qwen/Qwen2.5-0.5B", 494_032_768, 896, 24, 4864, 14, 2, 64, qk_norm=False),
    "qwen2.5-1.5b": _qwen("Qwen/Qwen2.5-1.5B", 1_543_714_304, 1536, 28, 8960, 12, 2, 128, qk_norm=False),
    "qwen2.5-3b": _qwen("Qwen/Qwen2.5-3B", 3_085_938_688, 2048, 36, 11_008, 16, 2, 128, qk_norm=False),
    "qwen3-0.6b": _qwen("Qwen/Qwen3-0.6B", 596_049_920, 1024, 28, 3072, 16, 8, 128, qk_norm=True),
    "qwen3-1.7b": _qwen("Qwen/Qwen3-1.7B", 1_720_574_976, 2048, 28, 6144, 16, 8, 128, qk_norm=True),
    "qwen3-4b": _qwen("Qwen/Qwen3-4B", 4_022_468_096, 2560, 36, 9728, 32, 8, 128, qk_norm=True),
    "gemma-2-2b": _gemma("google/gemma-2-2b", 2_614_341_888, 256_000, 2304, 26, 9216, 8, 4, qk_norm=False),
    "gemma-3-1b": _gemma("google/gemma-3-1b-pt", 999_885_952, 262_144, 1152, 26, 6912, 4, 1, qk_norm=True),
    "gemma-3-4b": _gemma(
        "google/gemma-3-4b-pt", 3_880_263_168, 262_208, 2560, 34, 10_240, 8, 4, qk_norm=True
    ),
    "smollm-135m": _llama("HuggingFaceTB/SmolLM-135M", 134_515_008, 49_152, 576, 30, 1536, 9, 3, 64),
    "smollm-360m": _llama("HuggingFaceTB/SmolLM-360M", 361_821_120, 49_152, 960, 32, 2560, 15, 5, 64),
    "smollm-1.7b": _llama("HuggingFaceTB/SmolLM-1.7B", 1_711_376_384, 49_152, 2048, 24, 8192, 32, 32, 64),
    "olmo-1b": Preset(model=_OLMO, source="allenai/OLMo-1B-hf", parameters=1_176_764_416),
    "phi-4-mini": Preset(model=_PHI_4_MINI, source="microsoft/Phi-4-mini-instruct", parameters=3_836_021_760),
}


def find_preset(name: str) -> Preset:
    """The preset `name`, in any case. Raises ConfigError that suggests those with a like name."""
    preset = PRESETS.get(name.lower())
    if preset is None:
        near = difflib.get_close_matches(name[:100].lower(), PRESETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(PRESETS)}"
        raise ConfigError(f"--preset {name[:100]}: there is no such preset; {hint}")
    return preset
