"""The GPT: the same model whole and in stages, from the same starting values."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from piper_owner.errors import ConfigError
from piper_owner.models import TIE, GPTConfig, GPTStage, build_model, build_stage, lm_loss, split_layers

CONFIG = GPTConfig(vocab_size=61, hidden=24, layers=4, heads=3, context=16)
SPLITS = (1, 2, 3, 4, 6)


def stages_of(num_stages: int, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[GPTStage]:
    return [build_stage(CONFIG, stage, num_stages, dtype=dtype, seed=seed) for stage in range(num_stages)]


def chain(stages: list[GPTStage], ids: Tensor) -> Tensor:
    value = ids
    for stage in stages:
        value = stage(value)
    return value


def some_ids(batch: int = 3, sequence: int = 10) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (batch, sequence), generator=torch.Generator().manual_seed(7))


def all_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


class TestSplitLayers:
    @given(num_layers=st.integers(0, 60), num_stages=st.integers(1, 30))
    def test_contiguous_even_and_no_stage_between_is_empty(self, num_layers: int, num_stages: int) -> None:
        if num_layers < num_stages - 2:
            with pytest.raises(ConfigError, match=f"{num_layers} layers over {num_stages} stages"):
                split_layers(num_layers, num_stages)
            return
        ranges = split_layers(num_layers, num_stages)
        assert len(ranges) == num_stages
        assert [layer for part in ranges for layer in part] == list(range(num_layers))
        sizes = [len(part) for part in ranges]
        assert max(sizes) - min(sizes) <= 1
        assert all(size >= max(sizes[0], sizes[-1]) for size in sizes[1:-1])
        assert sizes[0] >= sizes[-1]
        assert all(sizes[1:-1])

    @pytest.mark.parametrize(
        ("num_layers", "num_stages", "sizes"),
        [
            (4, 1, [4]),
            (4, 2, [2, 2]),
            (3, 2, [2, 1]),
            (4, 3, [1, 2, 1]),
            (4, 4, [1, 1, 1, 1]),
            (4, 6, [0, 1, 1, 1, 1, 0]),
            (5, 6, [1, 1, 1, 1, 1, 0]),
            (7, 4, [2, 2, 2, 1]),
            (0, 2, [0, 0]),
        ],
    )
    def test_known_splits(self, num_layers: int, num_stages: int, sizes: list[int]) -> None:
        assert [len(part) for part in split_layers(num_layers, num_stages)] == sizes

    def test_no_stage(self) -> None:
        with pytest.raises(ConfigError, match="at least 1 stage"):
            split_layers(4, 0)


class TestStages:
    @pytest.mark.parametrize("num_stages", SPLITS)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_every_split_has_the_parameters_of_the_whole(self, num_stages: int, dtype: torch.dtype) -> None:
        whole = all_parameters(build_model(CONFIG, dtype=dtype))
        seen: dict[str, nn.Parameter] = {}
        for stage in stages_of(num_stages, dtype=dtype):
            mine = all_parameters(stage)
            assert not set(mine) & set(seen)
            seen |= mine
        assert set(seen) == set(whole)
        for name, parameter in seen.items():
            assert parameter.dtype == dtype
            assert torch.equal(parameter, whole[name]), name

    @pytest.mark.parametrize("num_stages", SPLITS)
    def test_chained_stages_give_the_logits_of_the_whole(self, num_stages: int) -> None:
        ids = some_ids()
        whole = build_model(CONFIG, dtype=torch.float64)(ids)
        assert whole.shape == (3, 10, CONFIG.vocab_size)
        assert torch.equal(chain(stages_of(num_stages), ids), whole)

    @pytest.mark.parametrize("num_stages", SPLITS)
    def test_gradients_of_the_copies_add_up_to_the_gradient_of_the_one(self, num_stages: int) -> None:
        ids, labels = some_ids(), some_ids().roll(-1, 1)
        whole, stages = build_model(CONFIG, dtype=torch.float64), stages_of(num_stages)
        lm_loss(whole(ids), labels, num_tokens=30).backward()
        lm_loss(chain(stages, ids), labels, num_tokens=30).backward()
        parts = {name: p.grad for stage in stages for name, p in all_parameters(stage).items()}
        tied = [parts[name] for name in (TIE.names if num_stages > 1 else TIE.names[:1])]
        total = sum(grad for grad in tied if grad is not None)
        for name, parameter in whole.named_parameters():
            ours = total if name == TIE.name else parts[name]
            assert isinstance(ours, Tensor)
            torch.testing.assert_close(ours, parameter.grad, rtol=0, atol=1e-15)

    def test_names_are_those_of_the_full_model(self) -> None:
        first, middle, last = (set(all_parameters(stage)) for stage in stages_of(3))
        assert {"embed.weight", "positions.weight", "blocks.0.attention.query_key_value.weight"} <= first
        assert "blocks.1.mlp.expand.bias" in middle
        assert {"blocks.3.mlp_norm.weight", "norm.bias", "head.weight"} <= last
        assert "head.weight" not in first | middle
        assert "embed.weight" not in middle | last
        assert not any(name.startswith("head.bias") for name in last)

    def test_one_parameter_where_both_ends_are_here(self) -> None:
        whole = build_model(CONFIG)
        assert whole.embed is not None
        assert whole.head is not None
        assert whole.embed.weight is whole.head.weight
        assert [name for name, _ in whole.named_parameters() if name in TIE.names] == [TIE.name]
        assert set(TIE.names) <= set(whole.state_dict())

    def test_copies_are_equal_and_apart(self) -> None:
        first, last = stages_of(2)
        embed, head = first.get_parameter("embed.weight"), last.get_parameter("head.weight")
        assert torch.equal(embed, head)
        assert embed.data_ptr() != head.data_ptr()
        assert isinstance(embed, nn.Parameter)
        assert isinstance(head, nn.Parameter)
        assert head.requires_grad

    def test_meta_stage_has_the_shapes_and_the_tie(self) -> None:
        meta, real = build_model(CONFIG, device="meta"), build_model(CONFIG)
        assert {n: p.shape for n, p in all_parameters(meta).items()} == {
            n: p.shape for n, p in all_parameters(real).items()
        }
        assert meta.get_parameter("embed.weight") is meta.get_parameter("head.weight")
        assert all(parameter.is_meta for parameter in meta.parameters())

    def test_attention_looks_back_only(self) -> None:
        model, ids = build_model(CONFIG, dtype=torch.float64), some_ids(1)
        changed = ids.clone()
        changed[0, 6] = (changed[0, 6] + 1) % CONFIG.vocab_size
        before, after = model(ids), model(changed)
        assert torch.equal(before[:, :6], after[:, :6])
        assert not torch.allclose(before[:, 6:], after[:, 6:])

    def test_attention_equals_the_textbook(self) -> None:
        model = build_model(CONFIG, dtype=torch.float64)
        attention = model.get_submodule("blocks.0.attention")
        hidden = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        query, key, value = (
            part.view(2, 5, 3, 8).transpose(1, 2)
            for part in F.linear(hidden, attention.get_parameter("query_key_value.weight")).chunk(3, dim=-1)
        )
        scores = query @ key.mT / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(2, 5, 24)
        expected = F.linear(
            mixed, attention.get_parameter("projection.weight"), attention.get_parameter("projection.bias")
        )
        torch.testing.assert_close(attention(hidden), expected)

    def test_too_long_a_sequence(self) -> None:
        with pytest.raises(ConfigError, match="17 tokens is longer than the model's context of 16"):
            build_model(CONFIG)(some_ids(sequence=17))

    @pytest.mark.parametrize(("stage", "num_stages"), [(-1, 2), (2, 2), (0, 0)])
    def test_stage_out_of_range(self, stage: int, num_stages: int) -> None:
        with pytest.raises(ConfigError, match=f"stage {stage} of {num_stages}"):
            build_stage(CONFIG, stage, num_stages)

    @pytest.mark.parametrize(
        ("field", "value"),
        [("vocab_size", 0), ("hidden", 0), ("layers", 0), ("heads", 0), ("context", 0), ("heads", 5)],
    )
    def test_sizes_that_cannot_be(self, field: str, value: int) -> None:
        sizes = {"vocab_size": 61, "hidden": 24, "layers": 4, "heads": 3, "context": 16} | {field: value}
        with pytest.raises(ConfigError, match=f"{field}={value}"):
            GPTConfig(**sizes)


class TestStartingValues:
    def test_depend_on_the_seed_and_not_on_the_global_state(self) -> None:
        torch.manual_seed(1)
        state = torch.get_rng_state()
        one = all_parameters(build_model(CONFIG))
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(2)
        same, other = all_parameters(build_model(CONFIG)), all_parameters(build_model(CONFIG, seed=1))
        assert all(torch.equal(one[name], same[name]) for name in one)
        assert not torch.equal(one["embed.weight"], other["embed.weight"])
        assert not torch.equal(
            one["blocks.0.mlp.expand.weight"].flatten(), one["blocks.1.mlp.expand.weight"].flatten()
        )

    def test_do_not_follow_the_default_dtype(self) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            model = build_model(CONFIG, dtype=torch.float32)
        finally:
            torch.set_default_dtype(before)
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        assert torch.equal(
            model.get_parameter("embed.weight"), build_model(CONFIG).get_parameter("embed.weight")
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_are_the_float64_values_cast(self, dtype: torch.dtype) -> None:
        wide, narrow = build_model(CONFIG, dtype=torch.float64), build_model(CONFIG, dtype=dtype)
        for name, parameter in wide.named_parameters():
            assert torch.equal(parameter.to(dtype), narrow.get_parameter(name)), name

    def test_are_drawn_in_float64(self) -> None:
        weight = build_model(CONFIG, dtype=torch.float64).get_parameter("embed.weight")
        assert not torch.equal(weight, weight.float().double())

    def test_have_the_right_spread(self) -> None:
        config = GPTConfig(vocab_size=512, hidden=64, layers=8, heads=4, context=64)
        for name, parameter in build_model(config, dtype=torch.float64).named_parameters():
            value = parameter.detach()
            if name.endswith("bias"):
                assert not value.any(), name
            elif "norm" in name:
                assert bool((value == 1).all()), name
            else:
                expected = 0.02 / math.sqrt(16) if "projection" in name else 0.02
                assert value.std().item() == pytest.approx(expected, rel=0.06), name
                assert abs(value.mean().item()) < expected / 10, name

    def test_untrained_model_knows_nothing(self) -> None:
        ids = some_ids()
        loss = lm_loss(build_model(CONFIG)(ids), ids.roll(-1, 1), num_tokens=30)
        assert loss.item() == pytest.approx(math.log(CONFIG.vocab_size), rel=0.05)


class TestLoss:
    @settings(max_examples=50, deadline=None)
    @given(data=st.data(), microbatches=st.integers(1, 4))
    def test_microbatches_sum_to_the_mean_over_counted_tokens(
        self, data: st.DataObject, microbatches: int
    ) -> None:
        shape = (microbatches, 2, 3)
        logits = torch.randn(*shape, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        flat = data.draw(
            st.lists(st.sampled_from([-100, 0, 1, 4]), min_size=6 * microbatches, max_size=6 * microbatches)
        )
        labels = torch.tensor(flat).view(shape)
        num_tokens = int((labels != -100).sum())
        total = sum(
            lm_loss(logits[index], labels[index], num_tokens=num_tokens).item()
            for index in range(microbatches)
        )
        picked = logits.log_softmax(-1).flatten(0, 2)
        terms = [-picked[index, label].item() for index, label in enumerate(flat) if label != -100]
        assert total == pytest.approx(sum(terms) / len(terms) if terms else 0.0, abs=1e-12)

    @pytest.mark.parametrize("num_tokens", [0, 12])
    def test_no_label_counts(self, num_tokens: int) -> None:
        logits = torch.randn(2, 3, 5, requires_grad=True)
        loss = lm_loss(logits, torch.full((2, 3), -100), num_tokens=num_tokens)
        assert loss.item() == 0.0
        loss.backward()
        assert logits.grad is not None
        assert torch.equal(logits.grad, torch.zeros(2, 3, 5))

    @pytest.mark.parametrize(
        ("dtype", "computed"),
        [
            (torch.bfloat16, torch.float32),
            (torch.float16, torch.float32),
            (torch.float32, torch.float32),
            (torch.float64, torch.float64),
        ],
    )
    def test_dtype(self, dtype: torch.dtype, computed: torch.dtype) -> None:
        logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        labels = torch.tensor([[0, 1, 2], [3, 4, 0]])
        loss = lm_loss(logits, labels, num_tokens=6)
        assert loss.dtype == computed
        assert torch.equal(
            loss, F.cross_entropy(logits.to(computed).flatten(0, 1), labels.flatten(), reduction="sum") / 6
        )
        loss.backward()
        assert logits.grad is not None
        assert logits.grad.dtype == dtype
