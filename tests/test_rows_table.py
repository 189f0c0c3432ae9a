"""The compact table of rows by itself: what an nn.Embedding over it computes, and what is refused."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn import functional

from piper_owner.errors import RowIndexError, RowsError, TieError
from piper_owner.rows import RowsTable, checked_ids

VOCAB, WIDTH = 1000, 8


class Scaled(nn.Embedding):
    """As Gemma's: the class does more than look up."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


class Stage(nn.Module):
    """Embeddings over one table, and a layer behind them."""

    def __init__(self, *kinds: dict[str, Any], table: Tensor) -> None:
        super().__init__()
        shared = nn.Parameter(table.clone())
        self.embeds = nn.ModuleList([Scaled(len(table), WIDTH, **kind) for kind in kinds or ({},)])
        for embed in self.embeds:
            embed.weight = shared
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=table.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.embeds[0](ids)
        for place, embed in enumerate(self.embeds):
            rows = rows + (place + 1) * torch.sin(embed(ids.roll(place, -1)))
        return self.layer(rows)  # type: ignore[no-any-return]


class Pair:
    """A stage over a compact table, the same stage over the whole one, and the ids fetched."""

    def __init__(
        self, *kinds: dict[str, Any], dtype: torch.dtype = torch.float64, vocab: int = VOCAB
    ) -> None:
        torch.manual_seed(0)
        self.full = torch.randn(vocab, WIDTH, dtype=dtype)
        self.stage = Stage(*kinds, table=self.full)
        self.whole = copy.deepcopy(self.stage)
        embeds = [each for each in self.stage.embeds if isinstance(each, nn.Embedding)]
        self.table = RowsTable(embeds, embeds[0].weight, what="tie t on rank 0", device=torch.device("cpu"))  # type: ignore[arg-type]

    def fetch(self, *ids: Tensor) -> bool:
        """What a prefetch does; whether it added."""
        unique = checked_ids(ids, self.table.num_rows, self.table.what)
        wanted, adds = self.table.request(unique)
        half = len(wanted) // 2  # the rows arrive in two chunks
        values = self.full[wanted]
        chunks = [(0, half, values[:half]), (half, len(wanted), values[half:])]
        self.table.fill(chunk for chunk in chunks if chunk[0] < chunk[1])
        return adds

    def backward(self, *ids: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> None:
        """Forward and backward of both, with equal outputs."""
        for each in ids:
            given, right = self.stage(each) if run is None else run(each), self.whole(each)
            assert torch.equal(given, right)
            given.sin().sum().backward()
            right.sin().sum().backward()

    def finish(self, tolerance: float = 0.0) -> None:
        """Compare the gradients, and begin the next step."""
        found = self.table.take_grad()
        assert found is not None
        grad = self.whole.embeds[0].weight.grad
        assert isinstance(grad, Tensor)
        grad = grad.to_dense() if grad.is_sparse else grad
        assert (found - grad[self.table.ids]).abs().max().item() <= tolerance
        rest = grad.clone()
        rest[self.table.ids] = 0
        assert not rest.any(), "no other row has a gradient"
        for name, parameter in self.whole.layer.named_parameters():
            mine = self.stage.layer.get_parameter(name).grad
            assert mine is not None
            assert torch.equal(mine, parameter.grad)  # type: ignore[arg-type]
        self.table.forget()
        self.stage.zero_grad()
        self.whole.zero_grad()

    @property
    def weight(self) -> nn.Parameter:
        return self.stage.embeds[0].weight  # type: ignore[return-value]


def batches(step: int, *, vocab: int = VOCAB, length: int = 9) -> list[Tensor]:
    made = torch.Generator().manual_seed(step)
    return [torch.randint(0, vocab, (2, length + step), generator=made) for _ in range(3)]


KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "plain": ({},),
    "padding": ({"padding_idx": 0},),
    "last-padding": ({"padding_idx": -1},),
    "by-frequency": ({"scale_grad_by_freq": True},),
    "sparse": ({"sparse": True},),
    "three-lookups": ({}, {"padding_idx": 5}, {"padding_idx": 999}),
    "sparse-and-dense": ({"sparse": True}, {"scale_grad_by_freq": True, "padding_idx": 7}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_give_the_outputs_and_gradients_of_the_table(kind: str) -> None:
    pair = Pair(*KINDS[kind])
    paddings = [each.padding_idx for each in pair.stage.embeds if each.padding_idx is not None]
    for step in range(5):
        ids = batches(step)
        for place, padding in enumerate(paddings if step % 2 else ()):
            ids[0][0, place], ids[1][1, :] = padding, padding  # type: ignore[assignment]
        assert not pair.fetch(*ids), "a new step replaces"
        pair.backward(*ids)
        pair.finish(1e-13 if "lookups" in kind or kind == "sparse-and-dense" else 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_added_while_a_gradient_or_a_graph_is_pending(kind: str) -> None:
    pair = Pair(*KINDS[kind])
    first, second, third = batches(1), batches(2, length=60), batches(3, length=200)
    pair.fetch(*first)
    before = pair.table.parameter
    pair.backward(*first)
    pending, right = pair.stage(first[0]).sin().sum(), pair.whole(first[0]).sin().sum()
    assert pair.fetch(*second), "a gradient is there"
    assert pair.table.parameter is not before, "they need a larger table"
    pair.backward(*second)
    assert pair.fetch(*third)
    pair.backward(*first, *third)
    pending.backward()
    right.backward()
    pair.finish(1e-12)
    assert not pair.fetch(*first)


def test_a_graph_alone_makes_a_fetch_add() -> None:
    pair = Pair()
    ids = batches(0)
    pair.fetch(*ids)
    out = pair.stage(ids[0])
    assert pair.fetch(torch.tensor([0]))
    out.sum().backward()
    pair.table.forget()
    with torch.no_grad():
        pair.fetch(*ids)
        pair.stage(ids[0])
    assert not pair.fetch(torch.tensor([0])), "nothing is pending under no_grad"
    with pytest.raises(RowsError, match="was not fetched"):
        pair.stage(ids[0])


def test_no_row_before_the_first_fetch_and_then_a_table_that_fits() -> None:
    pair = Pair(vocab=100_000)
    assert pair.weight.shape == (0, WIDTH)
    assert sum(parameter.numel() for parameter in pair.stage.embeds.parameters()) == 0
    shapes = []
    made = torch.Generator().manual_seed(0)
    for num in (3, 64, 65, 1000, 1023, 900, 130, 0, 1, 5000, 5100, 4900):
        ids = torch.randint(0, 100_000, (num,), generator=made)
        pair.fetch(ids)
        capacity, limit = len(pair.weight), max(64, 2 * len(pair.table.ids))
        assert len(pair.table.ids) <= capacity <= limit
        pair.backward(ids)
        assert pair.weight.grad is None or len(pair.weight.grad) <= limit
        pair.table.forget()
        shapes.append(capacity)
    assert shapes[:3] == [64, 64, 128], "small steps share a shape"
    assert shapes[3:6] == [1024] * 3
    assert len(set(shapes[-3:])) == 1


@pytest.mark.parametrize(
    ("kind", "backend"),
    # aot_eager itself cannot add up the sparse gradients of two lookups in one graph.
    [
        ("plain", "aot_eager"),
        ("three-lookups", "eager"),
        pytest.param("three-lookups", "aot_eager", marks=pytest.mark.slow),
        pytest.param("sparse", "eager", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_stage_computes_the_same_and_rarely_compiles_again(kind: str, backend: str) -> None:
    torch._dynamo.reset()
    pair = Pair(*KINDS[kind])
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(pair.stage, fullgraph=True, backend=backend)
    with pytest.raises(RowsError, match="no row was fetched"):
        compiled(torch.tensor([[1, 2]]))
    graphs = []
    for step in range(6):
        ids = batches(step, length=3)
        pair.fetch(*ids)
        pair.backward(*ids, run=compiled)
        if step == 3:
            more = batches(9, length=60)
            assert pair.fetch(*more)
            pair.backward(*more, run=compiled)
        pair.finish(1e-12)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[2] == graphs[1], "the same shapes but for the length"
    assert graphs[-1] <= 6
    with torch.no_grad(), pytest.raises(RowsError, match="id 1 was not fetched"):
        compiled(torch.tensor([[1, 2]]))


OUTSIDE: dict[str, Callable[[nn.Parameter, nn.Module], object]] = {
    "sum": lambda w, _: w.sum(),
    "matmul": lambda w, _: torch.ones(2, WIDTH, dtype=w.dtype) @ w.T,
    "mm": lambda w, _: torch.mm(w, torch.ones(WIDTH, 2, dtype=w.dtype)),
    "linear": lambda w, _: functional.linear(torch.ones(2, WIDTH, dtype=w.dtype), w),
    "T": lambda w, _: w.T,
    "t": lambda w, _: w.t(),
    "data": lambda w, _: w.data,
    "index": lambda w, _: w[0],
    "set-item": lambda w, _: w.__setitem__(0, 1.0),
    "iterate": lambda w, _: list(w),
    "times": lambda w, _: 2 * w,
    "clone": lambda w, _: w.clone(),
    "numpy": lambda w, _: w.detach().numpy(),
    "detach": lambda w, _: w.detach() * 2,
    "cast": lambda w, _: torch.ones(2, WIDTH) @ w.to(torch.float32).t(),
    "half": lambda w, _: w.half().sum(),
    "functional": lambda w, _: functional.embedding(torch.tensor([1]), w),
    "bag": lambda w, _: functional.embedding_bag(torch.tensor([[1]]), w),
    "init": lambda w, _: nn.init.normal_(w),
    "vector": lambda w, _: nn.utils.parameters_to_vector([w]),
    "deepcopy-weight": lambda w, _: copy.deepcopy(w),
    "deepcopy": lambda _, stage: copy.deepcopy(stage),
    "pickle": lambda _, stage: pickle.dumps(stage),
}


@pytest.mark.parametrize("use", OUTSIDE)
def test_a_use_outside_the_modules_own_forward_is_refused(use: str) -> None:
    pair = Pair()
    pair.fetch(torch.tensor([0, 1]))
    with pytest.raises(RowsError, match="tie t on rank 0"):
        OUTSIDE[use](pair.weight, pair.stage)
    pair.backward(torch.tensor([[0, 1, 1]]))
    pair.finish(1e-15)


def test_a_failed_forward_leaves_the_table_closed() -> None:
    pair = Pair()
    pair.fetch(torch.tensor([0, 1]))
    with pytest.raises(RowsError, match="id 2 was not fetched"):
        pair.stage(torch.tensor([[0, 2]]))
    with pytest.raises(RowsError, match="outside the forward of its own"):
        functional.embedding(torch.tensor([1]), pair.weight)


def test_a_head_in_the_same_module_is_refused_in_its_forward() -> None:
    class Both(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) @ self.weight.t()

    embed = Both(5, WIDTH)
    table = RowsTable([embed], embed.weight, what="tie t on rank 0", device=torch.device("cpu"))  # type: ignore[arg-type]
    wanted, _ = table.request(torch.tensor([1]))
    table.fill(iter([(0, 1, torch.zeros(len(wanted), WIDTH))]))
    with pytest.raises(RowsError, match="layout='dense'"):
        embed(torch.tensor([1]))


def test_what_asks_without_computing_still_works() -> None:
    pair = Pair({"padding_idx": 3})
    stage, weight = pair.stage, pair.weight
    assert "1000, 8" in repr(stage)
    assert repr(weight)
    stage.to("cpu").train().eval()
    pair.fetch(torch.tensor([0, 3, 9]))
    names = dict(stage.named_parameters())
    assert names["embeds.0.weight"] is pair.weight
    assert names["embeds.0.weight"].shape == (64, WIDTH)
    pair.backward(torch.tensor([[0, 3, 9]]))
    nn.utils.clip_grad_norm_(stage.parameters(), 1e9)
    stage.zero_grad(set_to_none=False)
    assert not pair.weight.grad.any()  # type: ignore[union-attr]
    stage.zero_grad()
    assert pair.weight.grad is None
    stage.requires_grad_(False)
    assert not stage(torch.tensor([[0]])).requires_grad
    pair.table.forget()
    pair.fetch(torch.arange(200))
    assert not pair.weight.requires_grad, "also of a larger table"
    stage.requires_grad_(True)
    assert stage(torch.tensor([[0]])).requires_grad


def test_a_stage_that_changes_its_dtype_takes_rows_of_that() -> None:
    pair = Pair()
    pair.fetch(torch.tensor([1, 2]))
    pair.stage.float()
    pair.whole.float()
    pair.full = pair.full.float()
    ids = torch.tensor([[4, 5, 4]])
    pair.fetch(ids)
    assert pair.weight.dtype == torch.float32
    pair.backward(ids)
    pair.finish(1e-6)
    pair.fetch(torch.arange(300))
    assert pair.weight.dtype == torch.float32
    pair.backward(torch.arange(300)[None])


def test_the_state_of_a_stage_leaves_the_rows_out(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair({}, {"padding_idx": 5})
    pair.fetch(torch.tensor([1, 2]))
    saved = pair.stage.state_dict()
    assert sorted(saved) == ["layer.bias", "layer.weight"]
    assert pair.stage.load_state_dict(saved, strict=True).missing_keys == []
    assert not caplog.records
    whole = pair.whole.state_dict()
    assert len(whole) == 4
    with caplog.at_level(logging.WARNING):
        pair.stage.load_state_dict(whole, strict=True)
    assert len(whole) == 4, "it belongs to the caller"
    assert "embeds.0.weight was left out" in caplog.text
    assert "Ownership.sync()" in caplog.text
    pair.stage.load_state_dict(whole, strict=True, assign=True)
    del whole["embeds.1.weight"]
    pair.stage.load_state_dict(whole, strict=True)
    with pytest.raises(RuntimeError, match="Missing key"):
        pair.stage.load_state_dict({}, strict=True)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        pair.stage.load_state_dict({**whole, "embeds.0.bias": torch.zeros(1)}, strict=True)
    with pytest.raises(TieError, match=r"has shape \(999, 8\), the table has \(1000, 8\)"):
        pair.stage.load_state_dict({**whole, "embeds.0.weight": torch.zeros(999, WIDTH)})
    pair.backward(torch.tensor([[1, 2]]))
    pair.finish(1e-13)


def test_the_state_of_a_stage_through_torchs_distributed_checkpoint() -> None:
    pair = Pair()
    pair.fetch(torch.tensor([1, 2]))
    saved = get_model_state_dict(pair.stage)
    assert sorted(saved) == ["layer.bias", "layer.weight"]
    changed = {name: torch.zeros_like(value) for name, value in saved.items()}  # type: ignore[arg-type]
    set_model_state_dict(pair.stage, changed)  # type: ignore[arg-type]
    assert not pair.stage.layer.weight.any()
    set_model_state_dict(pair.stage, get_model_state_dict(pair.whole))
    assert torch.equal(pair.stage.layer.weight, pair.whole.layer.weight)


def test_a_padding_that_was_not_there_before_is_refused() -> None:
    pair = Pair({"padding_idx": 3})
    pair.fetch(torch.tensor([1, 2]))
    pair.stage.embeds[0].padding_idx = 1  # type: ignore[assignment]
    with pytest.raises(RowsError, match=r"padding_idx is 1, and was one of \[3\]"):
        pair.stage(torch.tensor([[1]]))


WRONG: dict[str, tuple[Any, str]] = {
    "large": (torch.tensor([3, 10]), r"id 10 is outside the vocabulary of 10 \(0 to 9\)"),
    "negative": (torch.tensor([-1, 3]), "id -1 is outside the vocabulary of 10"),
    "float": (torch.tensor([1.0]), r"ids\[0\] is torch.float32; ids are tensors of integers"),
    "bool": (torch.tensor([True]), r"ids\[0\] is torch.bool"),
    "complex": (torch.tensor([1j]), r"ids\[0\] is torch.complex64"),
    "list": ([1, 2], r"ids\[0\] is list"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_ids_that_cannot_be_looked_up_are_an_index_error(kind: str) -> None:
    ids, message = WRONG[kind]
    with pytest.raises(RowIndexError, match=message) as caught:
        checked_ids([ids], 10, "tie t")
    assert isinstance(caught.value, IndexError)


def any_ids() -> Iterator[tuple[Sequence[Tensor], list[int]]]:
    yield [], []
    yield [torch.empty(0, dtype=torch.int64), torch.empty(2, 0, 3, dtype=torch.int32)], []
    yield [torch.tensor(7)], [7]
    yield [torch.tensor([[3, 1], [1, 3]]).t(), torch.tensor([2], dtype=torch.uint8)], [1, 2, 3]
    yield [torch.tensor([200], dtype=torch.uint8), torch.tensor([4], dtype=torch.int16)], [4, 200]
    yield [torch.arange(20)[::5]], [0, 5, 10, 15]


@pytest.mark.parametrize(("ids", "unique"), list(any_ids()))
def test_ids_of_any_shape_and_integer_dtype(ids: Sequence[Tensor], unique: list[int]) -> None:
    found = checked_ids(ids, 1000, "tie t")
    assert found.dtype == torch.int64
    assert found.tolist() == unique


def test_a_lookup_of_an_id_outside_the_vocabulary_names_it() -> None:
    pair = Pair()
    pair.fetch(torch.tensor([0]))
    with pytest.raises(RowIndexError, match="id 1000 is outside the vocabulary of 1000"):
        pair.stage(torch.tensor([[0, 1000]]))
    with pytest.raises(RowIndexError, match="id -7 is outside"):
        pair.stage(torch.tensor([[-7]]))
