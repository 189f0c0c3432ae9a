"""Models of transformers, split into stages: the same logits, the same training, or a clear refusal."""

from __future__ import annotations

import copy
import itertools
import pickle
import queue
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import piper_owner
from piper_owner.assignment import assign_over
from piper_owner.errors import ConfigError, InputError
from piper_owner.executor.local import run_threads
from piper_owner.frontends import huggingface
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.ownership import LayoutChoice
from piper_owner.planning.balance import layer_counts
from piper_owner.transport import Fabric

transformers: Any = pytest.importorskip(
    "transformers", reason="needs the hf extra: pip install 'piper-owner[hf]'"
)

VOCABULARY: Final = 97
WAIT_SECONDS: Final = 60.0
NUM_LAYERS: Final = 4
COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": NUM_LAYERS,
    "n_head": 2,
    "n_positions": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
ALTERNATING: Final = ["sliding_attention", "full_attention"] * 2
# Windows are shorter than the sequences, and capping is strong enough to be seen.
CONFIGS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "gpt2": ("GPT2Config", GPT2),
    "llama": ("LlamaConfig", COMMON),
    "qwen3": ("Qwen3Config", COMMON),
    "gemma2": (
        "Gemma2Config",
        {
            **COMMON,
            "sliding_window": 4,
            "layer_types": ALTERNATING,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 1.0,
            "final_logit_softcapping": 2.0,
            "attn_implementation": "eager",
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**COMMON, "sliding_window": 4, "layer_types": ALTERNATING, "query_pre_attn_scalar": 8},
    ),
    "smollm3": ("SmolLM3Config", {**COMMON, "no_rope_layers": [1, 0, 1, 0]}),
    "phi": ("PhiConfig", {**COMMON, "partial_rotary_factor": 0.5}),
}
DTYPES: Final = {"float32": torch.float32, "float64": torch.float64}


def make_config(name: str, **changes: object) -> Any:  # noqa: ANN401 - a configuration of transformers
    kind, options = CONFIGS[name]
    return getattr(transformers, kind)(**{**options, **changes})


def make_from(config: object) -> Any:  # noqa: ANN401 - a model of transformers
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config)
    # Biases and norms are made as zeros and ones, which would hide that one is used twice or not at all.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@cache
def _prototype(name: str) -> Any:  # noqa: ANN401
    return make_from(make_config(name))


def make(name: str, dtype: torch.dtype = torch.float32) -> Any:  # noqa: ANN401
    return copy.deepcopy(_prototype(name)).to(dtype)


def make_ids(rows: int = 2, length: int = 12, seed: int = 3) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def chain(stages: Sequence[nn.Module], ids: Tensor, **options: Tensor) -> Tensor:
    tensor = ids
    for stage in stages:
        tensor = stage(tensor, **options)
    return tensor


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=1e-12 if expected.dtype == torch.float64 else 1e-6
    )


# -- the stages together are the model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_stages_in_a_chain_give_the_models_logits(name: str, dtype: str) -> None:
    model = make(name, DTYPES[dtype])
    ids = make_ids()
    expected = model(ids).logits
    for num_stages in (1, 2, 3, 4):
        stages = huggingface.split(model, num_stages)
        assert_same(chain(stages, ids), expected)
        assert sum(len(stage.layers) for stage in stages) == NUM_LAYERS


@pytest.mark.parametrize("name", CONFIGS)
def test_embedding_alone_and_head_alone_are_stages(name: str) -> None:
    model = make(name)
    ids = make_ids()
    stages = huggingface.split(model, 3, layers_per_stage=[0, NUM_LAYERS, 0])
    assert_same(chain(stages, ids), model(ids).logits)
    assert [len(list(stage.parameters())) for stage in stages[::2]] == [
        2 if name == "gpt2" else 1,
        {"gpt2": 3, "phi": 4}.get(name, 2),
    ]
    assert [len(stage.layers) for stage in huggingface.split(model, 6)] == [0, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_the_models_under_its_names(name: str) -> None:
    model = make(name)
    full = dict(model.named_parameters(remove_duplicate=False))
    stages = huggingface.split(model, 3)
    held = [(key, p) for stage in stages for key, p in stage.named_parameters(remove_duplicate=False)]
    assert len(held) == len(full)
    assert all(full[key] is parameter for key, parameter in held)
    keys = [key for stage in stages for key in stage.state_dict()]
    assert sorted(keys) == sorted(model.state_dict())


@pytest.mark.parametrize(("name", "changes"), [("gpt2", {"embd_pdrop": 0.4}), ("phi", {"embd_pdrop": 0.4})])
@pytest.mark.parametrize("layers", [[2, 2], [0, 4]])
def test_dropout_of_the_embedding_is_applied_once(
    name: str, changes: dict[str, float], layers: list[int]
) -> None:
    model = make_from(make_config(name, **changes)).train()
    ids = make_ids()
    stages = huggingface.split(model, 2, layers_per_stage=layers)
    torch.manual_seed(11)
    expected = model(ids).logits
    torch.manual_seed(11)
    assert_same(chain(stages, ids), expected)
    assert not torch.allclose(expected, model.eval()(ids).logits)


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_attention_mask_and_position_ids_are_the_models(name: str) -> None:
    model = make(name)
    ids = make_ids()
    options = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(12).expand(2, 12) + 3}
    options["attention_mask"][0, :5] = 0
    expected = model(ids, **options).logits
    assert_same(chain(huggingface.split(model, 3), ids, **options), expected)
    assert not torch.allclose(expected, model(ids).logits)


def test_scaling_in_the_decoders_forward_is_applied_once() -> None:
    options = {**COMMON, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
    del options["head_dim"]
    model = make_from(transformers.GraniteConfig(**options))
    ids = make_ids()
    assert_same(chain(huggingface.split(model, 3), ids), model(ids).logits)


def test_layers_that_return_tuples_are_stood_in_for_by_such() -> None:
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=NUM_LAYERS, n_head=2)
    model = make_from(config)
    ids = make_ids()
    assert_same(chain(huggingface.split(model, 3), ids), model(ids).logits)


def test_checkpointed_layers_recompute_their_own_microbatch() -> None:
    model = make("llama", torch.float64).train()
    batches = [make_ids(seed=seed) for seed in range(3)]
    sum(model(ids).logits.square().sum() for ids in batches).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    stages = huggingface.split(model, 3)
    outputs = [chain(stages, ids) for ids in batches]
    for output in outputs:
        output.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-9)


def test_splitting_leaves_the_model_and_the_random_state_alone() -> None:
    model = make("gemma2").train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    keys, before = list(model.state_dict()), torch.random.get_rng_state()
    stages = huggingface.split(model, 2)
    assert [module.training for module in model.modules()] == modes
    assert [stage.training for stage in stages] == [True, True]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert list(model.state_dict()) == keys
    ids = make_ids()
    expected = model(ids).logits
    stages[1].get_submodule("model").register_module("norm", nn.Identity())
    assert_same(model(ids).logits, expected)
    assert not torch.allclose(chain(stages, ids), expected)


@pytest.mark.parametrize("via", ["deepcopy", "pickle"])
def test_copied_stage_stands_alone(via: str) -> None:
    model = make("gemma3")
    ids = make_ids()
    expected = model(ids).logits
    stages = huggingface.split(model, 3)
    copies = [copy.deepcopy(s) if via == "deepcopy" else pickle.loads(pickle.dumps(s)) for s in stages]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same(chain(copies, ids), expected)
    assert not torch.allclose(chain(stages, ids), expected)


def test_stage_keeps_neither_its_input_nor_anothers_buffers() -> None:
    model = make("llama")
    stages = huggingface.split(model, 2)
    hidden = torch.zeros(1, 3, 16)
    alive = weakref.ref(hidden)
    stages[1](hidden)
    del hidden
    assert alive() is None
    rotary = [stage.get_submodule("model.rotary_emb") for stage in stages]
    assert rotary[0] is not rotary[1]
    assert model.model.rotary_emb not in rotary


def test_stand_in_answers_for_the_kind_of_a_layer() -> None:
    # Some decoders choose a layer's mask by asking the layer, not the configuration.
    def ask(decoder: nn.Module, original: Callable[[], object]) -> object:
        assert [layer.attention_type for layer in decoder.get_submodule("layers").children()] == ALTERNATING
        return original()

    model = with_forward(ask)
    for layer, kind in zip(model.model.layers, ALTERNATING, strict=True):
        layer.attention_type = kind
    ids = make_ids()
    assert_same(chain(huggingface.split(model, 3), ids), model(ids).logits)


# -- ties


@pytest.mark.parametrize("name", CONFIGS)
def test_ties_are_found_by_identity_and_by_declaration(name: str) -> None:
    table = "transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"
    expected = (piper_owner.Tie((table, "lm_head.weight")),)
    model = make(name)
    assert piper_owner.find_ties(model) == expected
    assert huggingface.find_ties(model) == expected
    with torch.device("meta"):
        emptied = transformers.AutoModelForCausalLM.from_config(make_config(name))
    assert huggingface.find_ties(emptied) == expected
    emptied.to_empty(device="cpu")
    assert piper_owner.find_ties(emptied) == ()
    assert huggingface.find_ties(emptied) == expected
    assert huggingface.find_ties(make_from(make_config(name, tie_word_embeddings=False))) == ()


def test_ties_are_declared_by_the_configuration_alone() -> None:
    # Before transformers 5 a model has no all_tied_weights_keys.
    model = make("llama")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    vars(model).pop("all_tied_weights_keys", None)
    assert huggingface.find_ties(model) == (piper_owner.Tie(("model.embed_tokens.weight", "lm_head.weight")),)
    model.config.tie_word_embeddings = False
    assert huggingface.find_ties(model) == ()


@pytest.mark.parametrize("name", CONFIGS)
def test_model_on_the_meta_device_is_split(name: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(make_config(name))
    stages = huggingface.split(model, 4)
    assert all(parameter.is_meta for stage in stages for parameter in stage.parameters())
    keys = [key for stage in stages for key in stage.state_dict()]
    assert sorted(keys) == sorted(make(name).state_dict())


# -- training


def share_of_loss(logits: Tensor, ids: Tensor, num_microbatches: int) -> Tensor:
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    return nn.functional.cross_entropy(flat, ids[:, 1:].reshape(-1)) / num_microbatches


def train_whole(model: nn.Module, batches: Sequence[Tensor], num_microbatches: int) -> list[float]:
    """In the same microbatches: some models sum parts of a gradient in float32, whatever theirs is."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        total = 0.0
        for ids in batch.chunk(num_microbatches):
            loss = share_of_loss(model(ids).logits, ids, num_microbatches)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train_in_two(
    model: nn.Module, batches: Sequence[Tensor], num_microbatches: int, *, layout: LayoutChoice = "dense"
) -> tuple[list[float], dict[str, Tensor]]:
    """A pipeline as a user writes it: two ranks, all forwards, then all backwards. Of rows no weight."""
    activations: queue.Queue[Tensor] = queue.Queue()
    grads: queue.Queue[Tensor] = queue.Queue()

    def work(fabric: Fabric) -> tuple[list[float], dict[str, Tensor]]:
        # Each rank has a model of its own, as in a process of its own.
        own_model = copy.deepcopy(model)
        ties = huggingface.find_ties(own_model)
        stage = huggingface.split(own_model, 2)[fabric.rank]
        ownership = assign_over(fabric, stage, ties, layout=layout)
        optimizer = OwnerOptimizer(stage.parameters(), torch.optim.AdamW, ownership=ownership, lr=1e-3)
        losses = []
        for batch in batches:
            total = 0.0
            optimizer.prefetch(batch if fabric.rank == 0 else None)
            if fabric.rank == 0:
                outputs = [stage(ids) for ids in batch.chunk(num_microbatches)]
                for output in outputs:
                    activations.put(output.detach())
                for output in outputs:
                    output.backward(grads.get(timeout=WAIT_SECONDS))
            else:
                for ids in batch.chunk(num_microbatches):
                    hidden = activations.get(timeout=WAIT_SECONDS).requires_grad_()
                    loss = share_of_loss(stage(hidden), ids, num_microbatches)
                    loss.backward()
                    assert hidden.grad is not None
                    grads.put(hidden.grad)
                    total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
            sent = optimizer.stats.sent
            num_rows = len(batch.unique()) if layout == "rows" else 0
            assert sent.ids == (4 * num_rows if fabric.rank == 0 else 0)
        assert ownership.check()
        ownership.close()
        return losses, dict(stage.state_dict())

    ranks = run_threads(2, work, timeout=timedelta(seconds=WAIT_SECONDS))
    return ranks[1][0], {**ranks[0][1], **ranks[1][1]}


@pytest.mark.parametrize("layout", ["dense", "rows"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_train_as_the_unsplit_model(name: str, dtype: str, layout: LayoutChoice) -> None:
    tolerance = 1e-10 if dtype == "float64" else 1e-5
    model = make(name, DTYPES[dtype])
    batches = [make_ids(rows=8, length=8, seed=step) for step in range(5)]
    losses, weights = train_in_two(model, batches, num_microbatches=4, layout=layout)
    expected = train_whole(model, batches, num_microbatches=4)
    assert losses == pytest.approx(expected, rel=0, abs=tolerance)
    assert len(set(expected)) == len(expected)
    if dtype == "float64":
        named = dict(model.named_parameters(remove_duplicate=False))
        table = huggingface.find_ties(model)[0].name
        assert set(named) - set(weights) == ({table} if layout == "rows" else set())
        for key in named.keys() & weights.keys():
            torch.testing.assert_close(weights[key], named[key], rtol=0, atol=tolerance)


# -- what cannot be split


def with_module(path: str, module: nn.Module) -> Any:  # noqa: ANN401
    model = make("llama")
    parent, _, leaf = path.rpartition(".")
    model.get_submodule(parent).register_module(leaf, module)
    return model


def with_forward(forward: Callable[..., object]) -> Any:  # noqa: ANN401
    """A model whose decoder is of a class with another forward, which gets the original one too."""
    model = make("llama")
    kind = type(model.model)
    original = kind.forward

    def changed(self: nn.Module, *args: object, **options: object) -> object:
        return forward(self, lambda: original(self, *args, **options))

    model.model.__class__ = type("OddModel", (kind,), {"forward": changed})
    return model


def make_shorter() -> Any:  # noqa: ANN401
    model = make("llama")
    del model.model.layers[3]
    return model


def make_patched() -> Any:  # noqa: ANN401
    model = make("llama")
    model.model.forward = model.model.forward
    return model


def make_loose() -> Any:  # noqa: ANN401
    model = make("llama")
    model.model.shift = nn.Parameter(torch.zeros(16))
    return model


def make_encoder_decoder() -> Any:  # noqa: ANN401
    options = {"vocab_size": VOCABULARY, "d_model": 16, "num_layers": 2, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**options, d_kv=8, d_ff=24))


def make_nested_embedding() -> Any:  # noqa: ANN401
    options = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "is_decoder": True}
    config = transformers.BertConfig(**options, num_attention_heads=2, intermediate_size=24)
    return transformers.BertLMHeadModel(config)


def make_per_layer_inputs() -> Any:  # noqa: ANN401
    options = {**COMMON, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCABULARY}
    config = transformers.Gemma3nTextConfig(
        **options, num_kv_shared_layers=0, layer_types=ALTERNATING, activation_sparsity_pattern=[0.0] * 4
    )
    return transformers.Gemma3nForCausalLM(config)


def make_vision() -> Any:  # noqa: ANN401
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=make_config("gemma3").to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def run_twice(_: nn.Module, original: Callable[[], object]) -> object:
    original()
    return original()


def look_into_layer(decoder: nn.Module, original: Callable[[], object]) -> object:
    decoder.get_submodule("layers.0.self_attn")
    return original()


def fail(_: nn.Module, original: Callable[[], object]) -> object:
    raise RuntimeError(f"no forward, not even {original.__name__}")


REFUSED: Final[dict[str, tuple[Callable[[], Any], str]]] = {
    "not transformers": (lambda: nn.Linear(2, 2), "not a transformers model"),
    "no head": (lambda: make("llama").model, "no head: .*AutoModelForCausalLM"),
    "no norm": (lambda: with_module("model.norm", nn.Identity()), "no final norm: model has no norm after"),
    "no layers": (make_shorter, "no list of layers"),
    "two lists": (
        lambda: with_module("model.more", nn.ModuleList(nn.Linear(1, 1) for _ in range(4))),
        "model.layers, model.more not understood",
    ),
    "module": (lambda: with_module("model.adapter", nn.Linear(16, 16)), "model.adapter not understood"),
    "parameter": (make_loose, "model.shift not understood"),
    "second head": (lambda: with_module("reward", nn.Linear(16, 1)), "reward not understood"),
    "two norms": (
        lambda: with_module("model.extra_norm", nn.LayerNorm(16)),
        "model.norm, model.extra_norm not understood",
    ),
    "patched": (make_patched, "model has a forward of its own"),
    "encoder": (make_encoder_decoder, "encoder-decoder"),
    "per-layer inputs": (lambda: make_per_layer_inputs(), "input of its own made from the ids"),
    "vision": (lambda: make_vision(), "vision not understood"),
    "nested embedding": (make_nested_embedding, "token embedding is not beside the layers"),
    "layers run twice": (lambda: with_forward(run_twice), "runs 2 times"),
    "looks into layers": (lambda: with_forward(look_into_layer), "its stages do not run"),
    "does not run": (lambda: with_forward(fail), "does not run on 4 tokens"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_model_that_cannot_be_split_is_refused_by_its_part(what: str) -> None:
    make_model, message = REFUSED[what]
    with pytest.raises(InputError, match=message):
        huggingface.split(make_model(), 2)


def test_what_an_embedding_only_stage_cannot_do_is_refused() -> None:
    options = {**COMMON, "embedding_multiplier": 3.0}
    del options["head_dim"]
    scaled = make_from(transformers.GraniteConfig(**options))
    layers = [0, NUM_LAYERS, 0]
    with pytest.raises(InputError, match="differ from its own"):
        huggingface.split(scaled, 3, layers_per_stage=layers)
    ids = make_ids()
    stages = huggingface.split(scaled, 3, layers_per_stage=layers, verify=False)
    assert not torch.allclose(chain(stages, ids), scaled(ids).logits)
    config = transformers.XGLMConfig(
        vocab_size=VOCABULARY, d_model=16, num_layers=2, attention_heads=2, ffn_dim=24, dropout=0.1
    )
    with pytest.raises(InputError, match=r"dropout=0\.1 would be applied twice"):
        huggingface.split(make_from(config), 2, layers_per_stage=[0, 2])


@pytest.mark.parametrize(
    ("num_stages", "layers"),
    [(0, None), (7, None), (2, [4]), (2, [1, 2]), (2, [5, -1]), (3, [2, 0, 2]), (2, [2, 2, 0])],
)
def test_number_of_stages_or_layers_that_cannot_be(num_stages: int, layers: list[int] | None) -> None:
    with pytest.raises(ConfigError, match="stages"):
        huggingface.split(make("llama"), num_stages, layers_per_stage=layers)


# -- balance


@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    head=st.integers(0, 20),
    num_stages=st.integers(1, 4),
)
def test_balance_is_the_best_of_all_divisions(costs: list[int], head: int, num_stages: int) -> None:
    num_stages = min(num_stages, len(costs) + 2)
    counts = layer_counts(costs, num_stages, head=head)

    def largest(division: Sequence[int]) -> int:
        bounds = [0, *itertools.accumulate(division)]
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        sums[-1] += head
        return max(sums)

    every = [
        division
        for division in itertools.product(range(len(costs) + 1), repeat=num_stages)
        if sum(division) == len(costs) and 0 not in division[1:-1]
    ]
    assert counts in every
    assert largest(counts) == min(map(largest, every))


def test_balance_weighs_the_head() -> None:
    assert layer_counts([1] * 8, 4, head=0) == (2, 2, 2, 2)
    assert layer_counts([1] * 7, 4, head=1) == (2, 2, 2, 1)
    assert layer_counts([1] * 4, 2, head=50) == (4, 0)
    assert layer_counts([1] * 62, 64, head=1) == (0, *[1] * 62, 0)
