"""Plans of models that are built: annotated ones, and those of transformers where it is installed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from piper_owner.cli import main
from piper_owner.cli.plan_model import measure_annotated
from piper_owner.data.batches import TokenStream
from piper_owner.errors import ConfigError
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.local import train_in_process
from piper_owner.frontends.piper.source import AnnotatedModel
from piper_owner.planning.compare import compare_methods
from piper_owner.planning.config import Method, PlanConfig
from piper_owner.planning.presets import PRESETS
from piper_owner.planning.shapes import Architecture, num_parameters, split_architecture

ROOT = Path(__file__).resolve().parent.parent
NAME = "examples.annotated:build"
VOCAB, LENGTH = 300, 16


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_an_annotated_model_as_it_trains() -> None:
    config = PlanConfig(stages=4, microbatches=4, tokens=4 * 2 * LENGTH, sequence=LENGTH, dtype="float32")
    shapes = measure_annotated(NAME, config, vocab=VOCAB)
    assert shapes.edges == {(stage, stage + 1): 64 for stage in range(3)}
    trained = TrainConfig(
        model=NAME,
        stages=4,
        microbatches=4,
        sequence_length=LENGTH,
        vocab=VOCAB,
        steps=2,
        timeout_seconds=30,
        layout="dense",
    )
    stream = TokenStream(
        np.random.default_rng(0).integers(0, VOCAB, 4000),
        microbatches=4,
        microbatch_size=2,
        sequence_length=LENGTH,
    )
    source = AnnotatedModel(target=NAME, folder=str(ROOT))
    result = train_in_process(trained, stream, compare=(RunKind.ALLREDUCE,), source=source)
    plans = compare_methods(shapes, config).plans
    for method, kind in ((Method.DENSE, RunKind.OWNER), (Method.ALL_REDUCE, RunKind.ALLREDUCE)):
        run = result.runs[kind]
        assert {r: m.optimizer for r, m in plans[method].memory.items()} == dict(run.optimizer_state_bytes)
        held = {rank: sum(w.nbytes for w in weights.values()) for rank, weights in run.weights.items()}
        assert {r: m.weights for r, m in plans[method].memory.items()} == held


def test_the_command_takes_the_stages_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    sizes = ("--vocab", "300", "--tokens", "512")
    assert main(["plan", "--model", NAME, *sizes, "--placement", "v", "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    assert (found["config"]["stages"], found["config"]["devices"]) == (4, 2)
    capsys.readouterr()
    assert main(["plan", "--model", NAME, *sizes, "--stages", "3"]) == 2
    assert "has 4 regions" in capsys.readouterr().err
    assert main(["plan", "--model", NAME, "--hidden", "8"]) == 2
    assert main(["plan", "--model", "no_such_module:build"]) == 2
    assert "no module 'no_such_module'" in capsys.readouterr().err


TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "vocab_size": 320,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 5, "n_head": 4, "vocab_size": 320, "n_positions": 64}),
    "llama-3.2-1b": ("LlamaConfig", {**TINY, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2.5-0.5b": ("Qwen2Config", {**TINY, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3-0.6b": (
        "Qwen3Config",
        {**TINY, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "gemma-2-2b": ("Gemma2Config", {**TINY, "num_key_value_heads": 2, "head_dim": 16}),
    "gemma-3-1b": ("Gemma3TextConfig", {**TINY, "num_key_value_heads": 2, "head_dim": 16}),
    "olmo-1b": ("OlmoConfig", {**TINY, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "phi-4-mini": (
        "Phi3Config",
        {**TINY, "num_key_value_heads": 2, "tie_word_embeddings": True, "pad_token_id": 0},
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_presets_have_the_tensors_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="needs the hf extra: pip install 'piper-owner[hf]'"
    )
    from piper_owner.cli.plan_model import measure_hugging_face

    kind, options = FAMILIES[name]
    config = getattr(transformers, kind)(**options)
    config.save_pretrained(tmp_path)
    found = measure_hugging_face(f"hf:{tmp_path}", 3)
    like = PRESETS[name].model
    model = Architecture(
        vocab=320,
        hidden=32,
        layers=5,
        ffn=128 if name == "gpt2" else 48,
        heads=4,
        kv_heads=getattr(config, "num_key_value_heads", 4),
        head_dim=getattr(config, "head_dim", None) or 8,
        gated=like.gated,
        norm=like.norm,
        norms=like.norms,
        qkv_bias=like.qkv_bias,
        bias=like.bias,
        qk_norm=like.qk_norm,
        fused=like.fused,
        positions=64 if like.positions else 0,
    )
    assert found.num_parameters == num_parameters(model)
    split = split_architecture(model, [2, 2, 1], name="")
    # GPT-2 keeps its matrices the other way round.
    mine, theirs = (
        Counter(tuple(sorted(shape)) for stage in each.stages for shape in stage.shapes)
        for each in (split, found)
    )
    assert mine == theirs


def test_a_model_without_transformers_or_without_a_config(tmp_path: Path) -> None:
    from piper_owner.cli.plan_model import measure_hugging_face

    with pytest.raises((ConfigError, ValueError), match="transformers"):
        measure_hugging_face(f"hf:{tmp_path}", 2)
