"""The rows layout equals the dense one, and one process, whatever is trained and however rows are fetched."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from chains import Chain, Found, Part, alone, closeness, microbatches, train
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import one_torch_thread
from torch import Tensor

LOOKUP, HEAD = Part(rank=0), Part(rank=1, looks_up=False)
TWO = Chain(parts=(LOOKUP, HEAD))
DATA = [microbatches(step) for step in range(5)]

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.02}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam-decay": (torch.optim.Adam, {"lr": 0.02, "weight_decay": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.02}),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def has_rows(found: Found, rank: int) -> bool:
    return any(tie.rows is not None for tie in found.owns[rank].exchange.tied.values())


FETCHES = ("once", "each", "next")
CLIPS = ((None, 2.0), (0.1, 2.0), (0.01, float("inf")))


def some(first: Iterable[Any], *others: Sequence[Any]) -> list[Any]:
    """Every combination; without --all a few of each of the first, with the others in turn."""
    found = []
    for place, one in enumerate(first):
        for index, rest in enumerate(itertools.product(*others)):
            is_slow = (index - place) % len(others[-1]) != 0 if len(others) == 1 else (index - place) % 4 != 0
            marks = [pytest.mark.slow] if is_slow else []
            found.append(pytest.param(one, *rest, marks=marks))
    return found


@pytest.mark.parametrize(("optimizer", "clip", "fetch"), some(OPTIMIZERS, CLIPS, FETCHES))
def test_five_steps_are_those_of_one_process_and_of_the_dense_layout(
    optimizer: str, clip: tuple[float | None, float], fetch: str
) -> None:
    kind, options = OPTIMIZERS[optimizer]
    chain = replace(TWO, kind=kind, options=options, clip=clip[0], norm_type=clip[1], fetch=fetch)
    right = alone(chain, DATA)
    rows = train(chain, DATA)
    assert has_rows(rows, 0)
    assert closeness(rows, right) < 1e-10
    dense = train(replace(chain, layout="dense"), DATA)
    assert not has_rows(dense, 0)
    assert closeness(dense, right) < 1e-10


MANY: dict[str, Chain] = {
    "two lookups on two ranks, one in the middle": Chain(
        num_ranks=4, parts=(LOOKUP, Part(rank=2), Part(rank=3, looks_up=False))
    ),
    "all holders dense or rows": Chain(
        num_ranks=4,
        parts=(LOOKUP, Part(rank=1, looks_up=False), Part(rank=2), Part(rank=3, looks_up=False)),
    ),
    "two lookups on one rank": Chain(
        parts=(LOOKUP, replace(LOOKUP, options=(("padding_idx", 3),)), HEAD),
    ),
    "lookup and head on the owner": Chain(parts=(LOOKUP, Part(rank=1), HEAD)),
    "lookup behind the head": Chain(parts=(HEAD, LOOKUP, Part(rank=1), LOOKUP)),
    "padding": Chain(parts=(replace(LOOKUP, options=(("padding_idx", 0),)), HEAD)),
    "by frequency": Chain(parts=(replace(LOOKUP, options=(("scale_grad_by_freq", True),)), HEAD)),
    "sparse": Chain(parts=(replace(LOOKUP, options=(("sparse", True),)), HEAD)),
    "two tables": Chain(
        parts=(LOOKUP, replace(LOOKUP, table=1), HEAD, replace(HEAD, table=1), replace(LOOKUP, table=1))
    ),
    "two tables each way": Chain(
        parts=tuple(
            Part(rank=rank, looks_up=looks_up, table=table)
            for table in range(4)
            for looks_up in (True, False)
            for rank in [(table % 2) ^ (not looks_up)]
        )
    ),
    "three tables in a circle": Chain(
        num_ranks=3,
        parts=tuple(Part(rank=r, table=r) for r in range(3))
        + tuple(Part(rank=(r + 1) % 3, table=r, looks_up=False) for r in range(3)),
    ),
}


@pytest.mark.parametrize(("which", "fetch"), some(MANY, FETCHES))
def test_any_number_of_uses_anywhere(which: str, fetch: str) -> None:
    chain = replace(MANY[which], fetch=fetch, clip=0.5)
    found = train(chain, DATA)
    assert any(has_rows(found, rank) for rank in range(chain.num_ranks))
    assert closeness(found, alone(chain, DATA)) < 1e-10


@pytest.mark.parametrize("master", [None, torch.float32])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_masters_over_bf16_are_the_dense_layouts_bit_for_bit(
    master: torch.dtype | None, clip: float | None, grad_dtype: torch.dtype | None
) -> None:
    chain = replace(TWO, dtype=torch.bfloat16, master_dtype=master, grad_dtype=grad_dtype, clip=clip)
    rows, dense = train(chain, DATA), train(replace(chain, layout="dense"), DATA)
    assert rows.losses == dense.losses
    for key, value in rows.weights.items():
        assert torch.equal(value, dense.weights[key])


# -- the ids of a step

CHANGING: dict[str, list[list[Tensor]]] = {
    "lengths": [microbatches(n, shape=(2, 1 + 7 * n % 5)) for n in range(5)],
    "a smaller last batch": [microbatches(0), microbatches(1), microbatches(2, num=1, shape=(1, 3))],
    "no tokens in the first step": [microbatches(0, shape=(2, 0)), *DATA],
    "no tokens in a step": [DATA[0], microbatches(0, shape=(0, 3)), *DATA],
    "no tokens in a microbatch": [[DATA[0][0], DATA[0][1][:0]], [DATA[1][0][:0], DATA[1][1]], *DATA],
    "scalars": [[torch.tensor(3), torch.tensor(3)], [torch.tensor(4)]],
    "the whole vocabulary": [[torch.arange(50)], [torch.arange(50).flip(0)], [torch.arange(5)]],
    "int32": [[ids.int() for ids in step] for step in DATA],
}


@pytest.mark.parametrize(("what", "fetch"), some(CHANGING, FETCHES))
def test_case_48_batches_of_any_size(what: str, fetch: str) -> None:
    for chain in (replace(TWO, fetch=fetch), replace(MANY["padding"], fetch=fetch)):
        assert closeness(train(chain, CHANGING[what]), alone(chain, CHANGING[what])) < 1e-10


def test_case_47_rows_get_their_counts_and_the_heads_half() -> None:
    chain = Chain(parts=(LOOKUP, HEAD), vocab=4, width=1, kind=torch.optim.SGD, options={"lr": 1.0})
    grads: list[Tensor] = []

    def work(loop: Any) -> None:  # noqa: ANN401 - a Loop
        loop.prefetch([torch.tensor([1, 1, 2])])
        use = loop.uses[loop.rank].use
        if loop.rank == 0:
            use(torch.tensor([1, 1, 2])).sum().backward()
        else:
            (use.weight * torch.tensor([[10.0], [20.0], [30.0], [40.0]])).sum().backward()
        loop.opt.finalize_grads()
        if loop.rank == 1:
            grads.append(use.weight.grad.clone())
        loop.opt.step()

    train(chain, (), work=work)
    assert grads[0].flatten().tolist() == [10, 22, 31, 40]


@pytest.mark.parametrize("sparse", [False, True])
def test_case_21_padding_gets_the_heads_half_alone(sparse: bool) -> None:
    options = (("padding_idx", 0), ("sparse", sparse))
    chain = Chain(parts=(replace(LOOKUP, options=options), HEAD), kind=torch.optim.SGD, options={"lr": 0.1})
    data = [[torch.tensor([[0, 0, 5]])] for _ in range(3)]
    found, right = train(chain, data), alone(chain, data)
    assert closeness(found, right) < 1e-12
    plain = alone(Chain(parts=(LOOKUP, HEAD), kind=torch.optim.SGD, options={"lr": 0.1}), data)
    assert closeness(plain, right) > 1e-3, "padding matters"


# -- random chains

tokens = st.integers(0, 6)


@st.composite
def chains(draw: st.DrawFn) -> tuple[Chain, list[list[Tensor]]]:
    """1 to 4 ranks, a table of any size, 1 to 3 lookups and 1 to 2 matmuls of it anywhere, any batches."""
    num_ranks = draw(st.sampled_from([2, 2, 3, 4, 1]))
    rank = st.integers(0, num_ranks - 1)
    vocab = draw(st.sampled_from([1, 2, 5, 30, 200]))
    parts = []
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        options: list[tuple[str, Any]] = []
        if draw(st.booleans()):
            options.append(("padding_idx", draw(st.integers(-vocab, vocab - 1))))
        name = draw(st.sampled_from(["", "", "", "sparse", "scale_grad_by_freq"]))
        options += [(name, True)] * bool(name)
        parts.append(Part(rank=draw(rank), options=tuple(options)))
    parts += [Part(rank=draw(rank), looks_up=False) for _ in range(draw(st.sampled_from([1, 1, 2])))]
    kind, options_of = draw(
        st.sampled_from([OPTIMIZERS["adamw"], OPTIMIZERS["momentum"], OPTIMIZERS["adafactor"]])
    )
    chain = Chain(
        parts=tuple(draw(st.permutations(parts))),
        vocab=vocab,
        width=draw(st.integers(1, 5)),
        num_ranks=num_ranks,
        layout="auto",
        kind=kind,
        options=options_of,
        clip=draw(st.sampled_from([None, 0.1])),
        fetch=draw(st.sampled_from(["once", "each", "next"])),
    )
    ids = st.integers(0, vocab - 1)
    microbatch = st.lists(ids, max_size=8).map(lambda row: torch.tensor(row, dtype=torch.int64))
    data = draw(st.lists(st.lists(microbatch, min_size=1, max_size=2), min_size=1, max_size=2))
    return chain, data


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(made=chains())
def test_random_chains_are_one_process(made: tuple[Chain, list[list[Tensor]]]) -> None:
    chain, data = made
    assert closeness(train(chain, data, check=False), alone(chain, data)) < 1e-10
