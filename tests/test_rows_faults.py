"""What the rows layout chooses and refuses, how rows are fetched, and what that moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from chains import Chain, Loop, Part, alone, closeness, microbatches, train
from owners import errors, ranks
from tiny import one_torch_thread
from torch import Tensor, nn

from piper_owner.assignment import assign_over
from piper_owner.errors import (
    ConfigError,
    ExchangeError,
    RowIndexError,
    RowsError,
)
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.rows import RowsTable
from piper_owner.transport import Fabric

LOOKUP, HEAD = Part(rank=0), Part(rank=1, looks_up=False)
TWO = Chain(parts=(LOOKUP, HEAD))
DATA = [microbatches(step) for step in range(5)]
NAMES = ("t0p0.use.weight", "t0p1.use.weight")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


# -- choices


def layouts(chain: Chain) -> dict[int, str]:
    """What each holder of the first tie keeps."""
    found = train(chain, (), work=lambda loop: None)
    return {holder.rank: holder.layout.value for holder in found.owns[0].plan.ties[0].holders}


ROWS, DENSE = {0: "rows", 1: "dense"}, {0: "dense", 1: "dense"}


@pytest.mark.parametrize(
    ("options", "kept", "owner"),
    [
        ({"layout": "auto"}, ROWS, 1),
        ({"layout": "rows"}, ROWS, 1),
        ({"layout": "dense"}, DENSE, 0),
        ({"layout": "rows", "owner": "last"}, ROWS, 1),
        ({"layout": "rows", "owner": 1}, ROWS, 1),
        ({"layout": "auto", "owner": "first"}, DENSE, 0),
        ({"layout": "auto", "owner": 0}, DENSE, 0),
        ({"layout": {NAMES[0]: "rows"}}, ROWS, 1),
        ({"layout": {NAMES[0]: "rows"}, "owner": {NAMES[0]: 1}}, ROWS, 1),
        ({"layout": {}}, DENSE, 0),
        ({"layout": "auto", "assign": {"uses": {NAMES[0]: "dense"}}}, DENSE, 0),
    ],
)
def test_choices_of_layout_and_owner(options: dict[str, Any], kept: dict[int, str], owner: int) -> None:
    chain = replace(TWO, **options)
    assert layouts(chain) == kept
    found = train(chain, DATA[:2])
    assert found.owns[0].plan.ties[0].owner == owner
    assert closeness(found, alone(chain, DATA[:2])) < 1e-10
    words = found.owns[0].describe()
    assert ("lookup use, rows only" in words) == (kept is ROWS)


REFUSED: dict[str, tuple[Chain, str]] = {
    "a lookup owner": (replace(TWO, owner="first"), "its owner would be rank 0, which only looks rows up"),
    "a lookup owner by rank": (replace(TWO, owner=0), "its owner would be rank 0"),
    "no lookup": (
        replace(TWO, parts=(replace(LOOKUP, looks_up=False), HEAD)),
        "needs a rank that only looks rows up and another",
    ),
    "no dense use": (replace(TWO, parts=(LOOKUP, Part(rank=1))), "needs a rank that only looks rows up"),
    "both on one rank": (replace(TWO, parts=(LOOKUP, replace(HEAD, rank=0))), "needs a rank that only looks"),
    "an unknown layout": (replace(TWO, layout="row"), "choose one of dense, rows, auto"),
    "an unknown tie": (replace(TWO, layout={"head": "rows"}), r"layout= names \['head'\]"),
    "a use that is no lookup": (
        replace(TWO, assign={"uses": {NAMES[0]: "dense"}}),
        "needs a rank that only looks rows up",
    ),
    "a linear said to look up": (
        replace(TWO, parts=(HEAD, Part(rank=0, looks_up=False)), assign={"uses": {NAMES[1]: "lookup"}}),
        "it is the weight of a Linear, and only an nn.Embedding",
    ),
    "max_norm": (
        replace(TWO, parts=(replace(LOOKUP, options=(("max_norm", 1.0),)), HEAD)),
        "max_norm=1.0, which rewrites the weight",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_on_every_rank(what: str) -> None:
    chain, message = REFUSED[what]
    for error in errors(2, lambda fabric: Loop(fabric, chain, [])):
        assert isinstance(error, ValueError)
        assert str(error), error
        with pytest.raises(ValueError, match=message):
            raise error


# -- fetching


def wrong_prefetch(ids: Any, *, rank: int = 0) -> None:  # noqa: ANN401 - anything a user may give
    """An error on every rank that names the ids, and then training goes on as if nothing had been."""
    said: list[str] = []

    def work(loop: Loop) -> Any:  # noqa: ANN401
        first = loop.steps(DATA[:2])
        for options in ({}, {"next_step": True}):
            with pytest.raises(IndexError) as caught:
                loop.opt.prefetch(*(ids if loop.looks_up else [None]), **options)
            assert isinstance(caught.value, RowIndexError)
            said.append(str(caught.value))
        loop.prefetch(DATA[2])
        with pytest.raises(IndexError):  # rows that are there stay
            loop.opt.prefetch(*(ids if loop.looks_up else [None]))
        total = sum(loop.pass_(each, share=2) for each in DATA[2])
        loop.opt.step()
        loop.opt.zero_grad()
        rest = loop.steps(DATA[3:])
        rest.losses = [*first.losses, total, *rest.losses]
        return rest

    found = train(TWO, (), work=work)
    assert closeness(found, alone(TWO, DATA)) < 1e-10
    wrong_prefetch.said = said  # type: ignore[attr-defined]
    assert len(said) == 4


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([torch.tensor([3, 50])], "id 50 is outside the vocabulary of 50"),
        ([torch.tensor([3]), torch.tensor([2**40])], f"id {2**40} is outside the vocabulary of 50"),
        ([torch.tensor([-1])], "id -1 is outside"),
        ([torch.tensor([0.5])], r"ids[0] is torch.float32"),
        ([torch.tensor([1]), [1, 2]], "ids[1] is list"),
        ([torch.tensor([True])], "ids[0] is torch.bool"),
    ],
)
def test_case_50_wrong_ids_are_an_index_error_on_every_rank(ids: list[Any], message: str) -> None:
    wrong_prefetch(ids)
    said: list[str] = wrong_prefetch.said  # type: ignore[attr-defined]
    assert all(message in text for text in said), said


def test_ids_given_where_nothing_is_looked_up_are_passed_over() -> None:
    def work(loop: Loop) -> Any:  # noqa: ANN401
        loop.opt.prefetch(*([torch.tensor([-5]), None] if loop.rank else DATA[0]))
        total = sum(loop.pass_(each, share=2) for each in DATA[0])
        loop.opt.step()
        found = loop.steps(())
        found.losses = [total]
        return found

    assert closeness(train(TWO, (), work=work), alone(TWO, DATA[:1])) < 1e-10


def test_a_forward_without_its_rows_is_an_error_and_not_garbage() -> None:
    def work(loop: Loop) -> None:
        if loop.rank == 0:
            with pytest.raises(RowsError, match=r"no row was fetched.*opt.prefetch\(ids\) on every rank"):
                loop.forward(DATA[0][0])
        loop.prefetch([torch.tensor([1, 2])])
        if loop.rank == 0:
            with pytest.raises(RowsError, match="id 3 was not fetched for this step"):
                loop.forward(torch.tensor([1, 3]))
            with pytest.raises(IndexError, match="id 50 is outside the vocabulary of 50"):
                loop.forward(torch.tensor([50]))
        loop.opt.step()
        if loop.rank == 0:
            with pytest.raises(RowsError, match="id 1 was not fetched"):
                loop.forward(torch.tensor([1]))

    train(TWO, (), work=work)


def test_none_everywhere_fetches_nothing() -> None:
    def work(loop: Loop) -> None:
        for given in ((), (None,), (None, None)):
            loop.opt.prefetch(*given)
            loop.opt.prefetch(*given, next_step=True)
            loop.opt.step()
            assert loop.opt.stats.sent.ids == loop.opt.stats.sent.rows == 0
        assert loop.own.check()

    train(TWO, (), work=work)


def test_a_rank_that_leaves_a_prefetch_out_is_named_within_the_timeout() -> None:
    lines = [(None, None)] * 2

    def work(fabric: Fabric) -> None:
        loop = Loop(fabric, TWO, lines)
        if loop.rank == 0:
            loop.prefetch(DATA[0])
        loop.opt.clip_grad_norm_(1.0)
        loop.opt.step()
        loop.prefetch(DATA[0])

    for error in errors(2, work, timeout=1.0):
        assert isinstance(error, ExchangeError | ConfigError), error


def test_a_prefetch_after_the_gradients_have_been_sent_is_refused() -> None:
    def work(loop: Loop) -> None:
        loop.prefetch(DATA[0])
        for each in DATA[0]:
            loop.pass_(each, share=2)
        loop.opt.clip_grad_norm_(1.0)
        with pytest.raises(ConfigError, match="after its gradients were sent"):
            loop.prefetch(DATA[1])
        loop.prefetch(DATA[1], next_step=True)
        loop.opt.step()
        loop.opt.zero_grad()
        for each in DATA[1]:
            loop.pass_(each, share=2)
        loop.opt.clip_grad_norm_(1.0)
        loop.opt.step()

    found = train(TWO, (), work=work)
    right = alone(replace(TWO, clip=1.0), DATA[:2])
    assert all(float((v - right.weights[k]).abs().max()) < 1e-12 for k, v in found.weights.items())


def test_rows_fetched_after_those_of_the_next_step() -> None:
    """Another accumulated microbatch comes up when the next step's ids are known already."""

    def work(loop: Loop) -> Any:  # noqa: ANN401
        losses = []
        loop.prefetch(DATA[0][:1])
        for number in range(3):
            total = loop.pass_(DATA[number][0], share=2)
            loop.prefetch(DATA[number + 1], next_step=True)
            loop.prefetch(DATA[number + 1][:1], next_step=True)  # in place of those
            loop.prefetch(DATA[number][1:])
            total += loop.pass_(DATA[number][1], share=2)
            loop.opt.step()
            loop.opt.zero_grad()
            losses.append(total)
        found = loop.steps(())
        found.losses = losses
        return found

    assert closeness(train(TWO, (), work=work), alone(TWO, DATA[:3])) < 1e-10


def test_bytes_are_those_of_the_rows_in_use() -> None:
    chain = replace(TWO, dtype=torch.float32, vocab=5000, width=16)
    data = [microbatches(step, vocab=5000, shape=(4, 9)) for step in range(3)]
    for fetch in ("once", "each"):
        found = train(replace(chain, fetch=fetch), data)
        for ids, replica, owner in zip(data, *found.stats, strict=True):
            num = len(torch.cat(ids).unique())
            assert (replica.sent.ids, replica.sent.rows) == (4 * num, 0)
            assert (owner.sent.ids, owner.sent.rows) == (0, num * 16 * 4)
            assert (replica.sent.grads, owner.sent.grads) == (num * 16 * 4, 0)
            assert replica.sent.weights == owner.sent.weights == 0
            assert replica.received == replace(owner.sent, other=replica.received.other)
            assert owner.received.grads == replica.sent.grads
            assert replica.seconds.rows > 0
        stage = found.stages[0]
        assert len(stage.get_parameter("t0p0.use.weight")) <= max(64, 2 * num)


def test_the_wire_takes_the_dtype_of_the_gradient() -> None:
    chain = replace(TWO, dtype=torch.bfloat16, grad_dtype=torch.float32)
    for ids, replica, owner in zip(DATA, *train(chain, DATA).stats, strict=True):
        num = len(torch.cat(ids).unique())
        assert replica.sent.grads == num * 4 * 4
        assert owner.sent.rows == num * 4 * 2


def test_tables_of_two_sizes_share_a_prefetch() -> None:
    def work(fabric: Fabric) -> None:
        stage = nn.Module()
        for name, size in (("words", 20), ("kinds", 3)):
            if fabric.rank == 0:
                stage.add_module(name, nn.Embedding(size, 2))
            else:
                stage.add_module(f"{name}_head", nn.Linear(2, size, bias=False))
            nn.init.ones_(next(stage.get_submodule(f"{name}{'_head' * fabric.rank}").parameters()))
        ties = [(f"{name}.weight", f"{name}_head.weight") for name in ("words", "kinds")]
        own = assign_over(fabric, stage, ties, layout="rows")
        opt = OwnerOptimizer(stage.parameters(), torch.optim.SGD, ownership=own, lr=0.25)
        with pytest.raises(IndexError, match="id 20 is outside the vocabulary of 20"):
            opt.prefetch(torch.tensor([20]) if fabric.rank == 0 else None)
        words, kinds = torch.tensor([19, 4]), torch.tensor([2, 2])
        opt.prefetch(*([words, kinds] if fabric.rank == 0 else [None]))
        if fabric.rank == 0:
            (stage.words(words) + stage.kinds(kinds)).sum().backward()  # type: ignore[operator]
            with pytest.raises(IndexError, match="id 19 is outside the vocabulary of 3"):
                stage.kinds(words)  # type: ignore[operator]
        opt.step()
        assert own.check()
        if fabric.rank == 1:
            assert stage.kinds_head.weight[2].tolist() == [0.5, 0.5]  # type: ignore[index, union-attr]
            assert stage.words_head.weight[2].tolist() == [1.0, 1.0]  # type: ignore[index, union-attr]

    ranks(2, work)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_the_weight_outlive_a_table_that_grows(register: str, when: str) -> None:
    torch.manual_seed(0)
    embed = nn.Embedding(500, 2)
    calls: list[int] = []

    def hook(value: Tensor) -> None:
        calls.append(1)

    def table_of() -> RowsTable:
        return RowsTable([embed], embed.weight, what="a tie", device=torch.device("cpu"))  # type: ignore[arg-type]

    embed.weight.no_decay = True  # type: ignore[attr-defined]
    if when == "before":
        handle = getattr(embed.weight, register)(hook)
        table = table_of()
    else:
        table = table_of()
        handle = getattr(embed.weight, register)(hook)
    for num in (3, 300):
        wanted, _ = table.request(torch.arange(num))
        table.fill(iter([(0, len(wanted), torch.zeros(len(wanted), 2))]))
        embed(torch.tensor([0])).sum().backward()
    assert len(calls) == 2
    assert embed.weight.no_decay  # type: ignore[attr-defined]
    handle.remove()
    embed(torch.tensor([0])).sum().backward()
    assert len(calls) == 2
