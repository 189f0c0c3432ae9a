"""What users of tied pipelines have run into, each with the right value, in a loop of their own.

The fixture of `owners.Rank`: W = 1 on two ranks, SGD at 0.1, gradients 2 and 3: 0.5 on both. A wrong value
tells the fault: 0.75 averaged, 0.8 the replica's share lost, 0.7 the owner's, 0.0 counted twice.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from owners import NAMES, TIE, Rank, Weights, add_grad, errors, near, ranks
from tiny import one_torch_thread
from torch import Tensor, nn

from piper_owner.assignment import assign_over
from piper_owner.errors import (
    ConfigError,
    ExchangeError,
    MessageMismatchError,
    PeerLostError,
    ReplicaMismatchError,
    TieError,
)
from piper_owner.optimizer_wrap import OwnerOptimizer, state_bytes
from piper_owner.transport import Fabric

Optimizers = Callable[..., torch.optim.Optimizer]
HALF = near(0.5)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


# -- the combined gradient


@pytest.mark.parametrize("owner", ["auto", "first", "last", 0, 1])
def test_case_01_three_steps_equal_one_process(owner: str | int) -> None:
    def work(fabric: Fabric) -> list[float]:
        rank = Rank(fabric, assign={"owner": owner})
        values = []
        for _ in range(3):
            rank.step()
            values.append(rank.value())
        return values

    found = ranks(2, work)
    assert found[0] == found[1] == near([0.5, 0.0, -0.5])


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_case_01_and_06_microbatches_and_accumulation(microbatches: int) -> None:
    def work(fabric: Fabric) -> tuple[float, int]:
        rank = Rank(fabric)
        with rank.opt.no_sync():
            for _ in range(microbatches - 1):
                rank.backward(1 / microbatches)
        rank.backward(1 / microbatches)
        rank.opt.step()
        return rank.value(), rank.opt.stats.sent.total

    assert [value for value, _ in ranks(2, work)] == [HALF, HALF]


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("devices", [1, 2])
def test_case_01_microbatches_on_one_device_or_two_equal_one_process(devices: int, microbatches: int) -> None:
    """Two stages: each adds its weight, times its factor, to a sum whose square is the loss."""
    factors = [torch.linspace(1, 2, 3, dtype=torch.float64), torch.linspace(-1, 1, 3, dtype=torch.float64)]
    rows = torch.linspace(0.5, 3, 12, dtype=torch.float64).view(4, 3).tensor_split(microbatches)

    def work(fabric: Fabric) -> tuple[list[Tensor], int]:
        held = NAMES if devices == 1 else (NAMES[fabric.rank],)
        stages = [Weights({name: torch.ones(3)}) for name in held]
        own = assign_over(fabric, stages, TIE)
        params = list({id(p): p for stage in stages for p in stage.parameters()}.values())
        assert len(params) == 1
        opt = OwnerOptimizer(params, torch.optim.AdamW, ownership=own, lr=0.1)
        seen, sent = [], 0
        for _ in range(3):
            for part in rows:
                # Each side knows the other's weight: it is equal, and a constant to this side.
                terms = [params[0] if n in held else params[0].detach() for n in NAMES]
                total = sum((t * f for t, f in zip(terms, factors, strict=True)), start=part)
                (total**2).sum().backward()
            opt.step()
            opt.zero_grad()
            assert own.check()
            seen.append(params[0].detach().clone())
            sent += opt.stats.sent.total
        return seen, sent

    whole = nn.Parameter(torch.ones(3, dtype=torch.float64))
    bare = torch.optim.AdamW([whole], lr=0.1)
    expected = []
    for _ in range(3):
        for part in rows:
            ((part + whole * factors[0] + whole * factors[1]) ** 2).sum().backward()
        bare.step()
        bare.zero_grad()
        expected.append(whole.detach().clone())
    for seen, sent in ranks(devices, work):
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(seen, expected, strict=True))
        assert (sent == 0) == (devices == 1)


def test_case_02_messages_do_not_depend_on_microbatches() -> None:
    def work(fabric: Fabric, microbatches: int) -> tuple[int, int, Any]:
        rank = Rank(fabric)
        line = rank.own.exchange.lines[1 - rank.rank]
        before = line.messages
        for _ in range(microbatches):
            rank.backward()
        rank.opt.step()
        return rank.rank, line.messages - before, rank.opt.stats.sent.to_dict()

    one, four, sixteen = (ranks(2, partial(work, microbatches=n)) for n in (1, 4, 16))
    assert one == four == sixteen
    assert [messages for _, messages, _ in one] == [1, 1]
    assert one[0][2]["weights"] == 8
    assert one[0][2]["grads"] == 0
    assert one[1][2]["grads"] == 8
    assert one[1][2]["weights"] == 0


def test_case_01_names_on_one_rank_are_one_parameter_without_messages() -> None:
    def work(fabric: Fabric) -> tuple[float, int, int]:
        stages = [Weights({NAMES[0]: 1.0}), Weights({NAMES[1]: 1.0})] if fabric.rank == 0 else []
        own = assign_over(fabric, stages, TIE)
        params = list({id(p): p for stage in stages for p in stage.parameters()}.values())
        opt = OwnerOptimizer(params, torch.optim.SGD, ownership=own, lr=0.1)
        for stage, grad in zip(stages, (2.0, 3.0), strict=False):
            add_grad(next(iter(stage.parameters())), grad)
        opt.step()
        own.check()
        return params[0].item() if params else 0.5, len(params), opt.stats.sent.total

    assert ranks(2, work) == [(HALF, 1, 0), (HALF, 0, 0)]


@pytest.mark.parametrize("rank_with_it", [0, 1])
@pytest.mark.parametrize("beside", ["no .grad", "a .grad"])
def test_case_03_main_grad_is_refused(rank_with_it: int, beside: str) -> None:
    def work(fabric: Fabric) -> None:
        rank = Rank(fabric)
        if rank.rank == rank_with_it:
            rank.weight.main_grad = torch.full((1,), 3.0)  # type: ignore[attr-defined]
            if beside == "a .grad":
                rank.backward()
        else:
            rank.backward()
        before = rank.weight.detach().clone()
        try:
            rank.opt.step()
        finally:
            assert torch.equal(rank.weight, before)

    found = errors(2, work)
    assert isinstance(found[rank_with_it], TieError)
    for error in found:
        assert "main_grad" in str(error)
        assert NAMES[0] in str(error)


def test_case_03_a_stale_zero_main_grad_is_ignored() -> None:
    def work(fabric: Fabric) -> float:
        rank = Rank(fabric)
        rank.weight.main_grad = torch.zeros(1)  # type: ignore[attr-defined]
        rank.step()
        return rank.value()

    assert ranks(2, work) == [HALF, HALF]


def test_case_07_clip_then_step_exchanges_once() -> None:
    def work(fabric: Fabric) -> tuple[float, float, int]:
        rank = Rank(fabric)
        rank.backward()
        norm = rank.opt.clip_grad_norm_(100.0)
        rank.opt.finalize_grads()
        rank.opt.step()
        return float(norm), rank.value(), rank.opt.stats.sent.grads

    assert ranks(2, work) == [(5.0, HALF, 0), (5.0, HALF, 8)]


@pytest.mark.parametrize(
    ("grads", "value"), [((2.0, None), 0.8), ((None, 3.0), 0.7), ((None, None), 1.0)], ids=str
)
@pytest.mark.parametrize("clip", [False, True])
def test_case_08_none_gradients(grads: tuple[float | None, float | None], value: float, clip: bool) -> None:
    def work(fabric: Fabric) -> float:
        rank = Rank(fabric, grads=grads)
        rank.backward()
        if clip:
            rank.opt.clip_grad_norm_(100.0)
        rank.opt.step()
        return rank.value()

    assert ranks(2, work) == [near(value)] * 2


@pytest.mark.parametrize("clip", [False, True])
def test_case_08_all_none_is_no_step_for_adam(clip: bool) -> None:
    def work(fabric: Fabric) -> tuple[float, float]:
        rank = Rank(fabric, torch.optim.Adam)
        rank.step()
        first = rank.value()
        if clip:
            rank.opt.clip_grad_norm_(1.0)
        rank.opt.step()
        return first, rank.value()

    for first, second in ranks(2, work):
        assert first == near(0.9, 1e-6)
        assert second == first  # zeros would give 0.8330


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("owner", [0, 1, 2])
def test_case_09_frozen_on_all_sends_nothing_and_unfreezes_together(owner: int, clip: bool) -> None:
    names = ("a.w", "b.w", "c.w")

    def work(fabric: Fabric) -> list[tuple[int, int, float]]:
        rank = Rank(
            fabric,
            torch.optim.AdamW,
            values={names[fabric.rank]: 1.0},
            ties=[names],
            assign={"owner": owner},
            params=lambda module: module.requires_grad_(False).parameters(),
            weight_decay=0.5,
        )
        lines = rank.own.exchange.lines.values()
        parameter = rank.module.get_parameter(names[fabric.rank])
        found = []
        for live in (False, False, True, True, False, False, True):
            parameter.requires_grad_(live)
            add_grad(parameter, 1.0 if live else None)
            before = sum(line.messages for line in lines)
            if clip:
                rank.opt.clip_grad_norm_(1e6)
            rank.opt.step()
            rank.opt.zero_grad()
            sent = rank.opt.stats.sent.grads + rank.opt.stats.sent.weights
            found.append((sum(line.messages for line in lines) - before, sent, parameter.item()))
            assert len(rank.opt.state) == int(fabric.rank == owner and len(found) > 2)
            assert rank.own.check()
        return found

    def expected(rank: int) -> list[tuple[int, int, float]]:
        num = 2 if rank == owner else 1  # messages of a step; a change is announced with as many more
        steps = [(0, 0), (0, 0), (2, 8), (1, 8), (1, 0), (0, 0), (2, 8)]
        values = [1.0, 1.0, 0.85, 0.7075, 0.7075, 0.7075, 0.572125]
        return [(m * num, b * num, v) for (m, b), v in zip(steps, values, strict=True)]

    for rank, found in enumerate(ranks(3, work)):
        assert [each[:2] for each in found] == [each[:2] for each in expected(rank)]
        assert [each[2] for each in found] == near([each[2] for each in expected(rank)], 1e-6)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adadelta])
def test_case_09_a_frozen_tie_with_an_old_gradient_is_not_stepped(kind: Optimizers) -> None:
    """Beside one that is: streamed by SGD, and stepped whole by Adadelta."""
    ties = (("a.w", "b.w"), ("c.w", "d.w"))

    def work(fabric: Fabric) -> tuple[float, bool]:
        names = [names[fabric.rank] for names in ties]
        rank = Rank(fabric, kind, values=dict.fromkeys(names, 1.0), ties=ties)
        frozen, live = map(rank.module.get_parameter, names)
        for parameter in (frozen, live):
            add_grad(parameter, 1.0)
        frozen.requires_grad_(False)
        rank.opt.step()
        assert rank.own.check()
        return frozen.item(), live.item() < 1.0

    assert ranks(2, work) == [(1.0, True), (1.0, True)]


def test_case_09_frozen_on_one_is_refused_everywhere() -> None:
    def work(fabric: Fabric) -> None:
        module = Weights({NAMES[fabric.rank]: 1.0})
        module.get_parameter(NAMES[fabric.rank]).requires_grad_(fabric.rank == 0)
        assign_over(fabric, module, TIE)

    for error in errors(2, work):
        assert isinstance(error, TieError)
        assert "requires_grad" in str(error)
        assert NAMES[1] in str(error)


def test_case_09_frozen_on_one_before_the_optimizer_is_refused_everywhere() -> None:
    def params(rank: int) -> Callable[[nn.Module], Any]:
        return lambda module: module.requires_grad_(rank == 0).parameters()

    for error in errors(2, lambda f: Rank(f, params=params(f.rank))):
        assert isinstance(error, TieError)
        assert f"tie {NAMES[0]!r}: requires_grad is True on rank 0 and False on rank 1" in str(error)


@pytest.mark.parametrize("thaws", [False, True], ids=["freezes", "thaws"])
@pytest.mark.parametrize("how", ["streamed", "whole", "clipped"])
@pytest.mark.parametrize(
    ("changed", "owner"), [([0], 0), ([1], 0), ([1, 2], 0), ([2], 1), ([0, 2], 1), ([1], 1), ([0, 1], 1)]
)
def test_case_09_a_tie_that_only_some_ranks_freeze_or_thaw(
    changed: list[int], owner: int, how: str, thaws: bool
) -> None:
    """Three holders, and a second tie before it that all of them train."""
    ties = (("a.w", "b.w", "c.w"), ("x.w", "y.w", "z.w"))

    def work(fabric: Fabric) -> list[str]:
        names = [names[fabric.rank] for names in ties]
        kind = torch.optim.Adadelta if how == "whole" else torch.optim.Adam
        rank = Rank(
            fabric, kind, values=dict.fromkeys(names, 1.0), ties=ties, assign={"owner": owner}, local=1.0
        )
        first, second = map(rank.module.get_parameter, names)
        for step in range(3):
            is_odd = step == 2 and fabric.rank in changed
            second.requires_grad_((thaws if is_odd else not thaws) if step else True)
            add_grad(first, 1.0)
            if second.requires_grad:
                add_grad(second, 1.0)
            add_grad(rank.local, 1.0)
            if step < 2:
                rank.opt.step()
                rank.opt.zero_grad()
        before = [p.item() for p in (first, second)]
        state = {n: {k: str(v) for k, v in rank.opt.state[p].items()} for n, p in _owned(rank, names)}
        with pytest.raises(ExchangeError) as caught:
            rank.opt.clip_grad_norm_(1.0) if how == "clipped" else rank.opt.step()
        assert [p.item() for p in (first, second)] == before
        assert {n: {k: str(v) for k, v in rank.opt.state[p].items()} for n, p in _owned(rank, names)} == state
        return [type(caught.value).__name__, str(caught.value)]

    others = [rank for rank in range(3) if rank not in changed]
    frozen, live = (others, changed) if thaws else (changed, others)
    found = ranks(3, work, timeout=timedelta(seconds=3))
    named = 0
    for kind, text in found:
        assert f"tie {ties[1]}" in text, (kind, text)
        assert "requires_grad is False on rank " in text
        assert "in step 2" in text
        part = text.partition("requires_grad is False on rank ")[2].partition(" in step 2")[0]
        seen_frozen, seen_live = (
            {int(r) for r in each.split(" and ")} for each in part.split(" and True on rank ")
        )
        assert seen_frozen <= set(frozen)
        assert seen_live <= set(live)
        named += (seen_frozen, seen_live) == (set(frozen), set(live))
    # Where the owner changed, a replica may see that before the owner has heard from all replicas.
    assert named or owner in changed


def _owned(rank: Rank, names: list[str]) -> list[tuple[str, nn.Parameter]]:
    parameters = [(name, rank.module.get_parameter(name)) for name in names]
    return [(name, parameter) for name, parameter in parameters if parameter in rank.opt.state]


def test_case_09_thawed_on_one_where_the_other_has_nothing_to_wait_for() -> None:
    """The other side waits for no message of a frozen tie: it hears of it in its next agreement."""

    def work(fabric: Fabric) -> None:
        rank = Rank(fabric, params=lambda module: module.requires_grad_(False).parameters())
        rank.weight.requires_grad_(fabric.rank == 1)
        rank.backward() if fabric.rank == 1 else None
        try:
            rank.opt.step()
            rank.opt.clip_grad_norm_(1.0)
        finally:
            assert rank.weight.item() == 1.0

    still, thawed = errors(2, work, timeout=1.0)
    assert isinstance(thawed, ExchangeError)
    for part in (
        f"change of requires_grad of {NAMES[0]!r} from rank 0 to rank 1, step 0",
        f"requires_grad of {NAMES[0]!r} is now True on rank 1",
        "on every rank that holds it",
    ):
        assert part in str(thawed)
    assert isinstance(still, ExchangeError)
    assert "the global norm of step 1" in str(still)


@pytest.mark.parametrize("skipping", [0, 1, 2])
@pytest.mark.parametrize("owner", [0, 1, 2])
def test_a_step_that_one_rank_leaves_out_names_the_steps_on_every_holder(owner: int, skipping: int) -> None:
    names = ("a.w", "b.w", "c.w")

    def work(fabric: Fabric) -> None:
        rank = Rank(fabric, values={names[fabric.rank]: 1.0}, ties=[names], assign={"owner": owner})
        parameter = rank.module.get_parameter(names[fabric.rank])
        for step in range(4):
            add_grad(parameter, 1.0)
            rank.opt.clip_grad_norm_(1.0)
            if not (step == 2 and fabric.rank == skipping):
                rank.opt.step()
        rank.own.check()

    for error in errors(3, work, timeout=3.0):
        assert isinstance(error, ExchangeError)
        text = str(error)
        assert re.search(r"rank \d in 3, .*rank \d in 2|rank \d in 2, .*rank \d in 3|step 2", text), text


def test_case_11_two_ties_at_once_one_of_them_a_vector() -> None:
    ties = (("a.weight", "b.weight"), ("norm.weight", "out.weight"))

    def work(fabric: Fabric) -> list[list[float]]:
        names = [names[fabric.rank] for names in ties]
        start = {names[0]: torch.eye(2), names[1]: torch.tensor([1.0, 2.0, 3.0])}
        rank = Rank(fabric, ties=ties, values=start, assign={"owner": {"norm.weight": 1}})
        table, vector = (rank.module.get_parameter(name) for name in names)
        add_grad(table, 2.0 + fabric.rank)
        add_grad(vector, torch.tensor([1.0, 2.0, 3.0]) * (1 + fabric.rank))
        rank.opt.step()
        rank.own.check()
        assert [len(group["params"]) for group in rank.opt.param_groups] == [1]
        return [table.flatten().tolist(), vector.tolist()]

    for table, vector in ranks(2, work):
        assert table == near([0.5, -0.5, -0.5, 0.5])
        assert vector == near([0.7, 1.4, 2.1])


def test_case_11_a_missing_partner_is_named_on_every_rank() -> None:
    def work(fabric: Fabric) -> None:
        assign_over(fabric, Weights({NAMES[0]: 1.0}) if fabric.rank == 0 else [], TIE)

    for error in errors(2, work):
        assert isinstance(error, TieError)
        assert "no stage holds 'head.weight'" in str(error)


# -- copies stay equal


@pytest.mark.parametrize("master", [None, torch.float32])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_case_13_equal_after_init_20_steps_a_skip_and_a_load(
    kind: Optimizers, master: torch.dtype | None
) -> None:
    """By the weights themselves, beside `check`."""

    def work(fabric: Fabric) -> list[Tensor]:
        start = torch.linspace(-1, 1, 12).view(4, 3)
        rank = Rank(
            fabric,
            kind,
            values={NAMES[fabric.rank]: start},
            dtype=torch.bfloat16,
            master_dtype=master,
            grads=(torch.linspace(0, 3, 12).view(4, 3), torch.linspace(1, -2, 12).view(4, 3)),
        )
        seen: list[Tensor] = []

        def look() -> None:
            assert rank.own.check()
            seen.append(rank.weight.detach().clone())

        look()
        for _ in range(20):
            rank.step()
            look()
        rank.backward()
        rank.opt.clip_grad_norm_(1.0)
        rank.opt.zero_grad()  # a skipped step
        look()
        rank.opt.load_state_dict(rank.opt.state_dict())
        look()
        rank.step()
        look()
        return seen

    owner, replica = ranks(2, work)
    assert len(owner) == 24
    assert all(torch.equal(one.to(two.dtype), two) for one, two in zip(owner, replica, strict=True))
    changed = [not torch.equal(one, two) for one, two in itertools.pairwise(owner)]
    assert changed == [True] * 20 + [False, False, True]  # a skipped step, a load


@pytest.mark.filterwarnings("ignore:tie .*differed:UserWarning")
@pytest.mark.parametrize("owner", [0, 1])
def test_case_16_the_value_of_the_first_name_wins_whoever_owns(owner: int) -> None:
    def work(fabric: Fabric) -> float:
        rank = Rank(fabric, values={NAMES[fabric.rank]: [7.0, 9.0][fabric.rank]}, assign={"owner": owner})
        return rank.value()

    assert ranks(2, work) == [7.0, 7.0]


def test_case_16_differing_copies_warn_once_with_the_largest_difference() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks(2, lambda f: Rank(f, values={NAMES[f.rank]: [7.0, 9.0][f.rank]}))
    assert [str(w.message).partition(" before")[0] for w in caught] == [
        f"tie {NAMES}: the copy on rank 1 differed from that of rank 0 by up to 2"
    ]


def test_case_16_as_an_error_the_warning_leaves_nobody_waiting() -> None:
    names = ("a.w", "b.w", "c.w")

    def work(fabric: Fabric) -> str:
        module = Weights({names[fabric.rank]: [7.0, 9.0, 11.0][fabric.rank]})
        try:
            assign_over(fabric, module, [names], owner=1)
        except UserWarning as warning:
            return str(warning)
        return "went on"

    found = ranks(3, work)
    assert found[0] == "went on"
    assert "rank 1 differed from that of rank 0 by up to 2 " in found[1]
    assert "rank 2 differed from that of rank 0 by up to 4 " in found[2]


def test_case_18_every_call_works_on_ranks_without_the_tie() -> None:
    names = {0: "embed.weight", 3: "head.weight"}

    def work(fabric: Fabric) -> tuple[float, int, float]:
        holds = fabric.rank in names
        rank = Rank(fabric, values={names[fabric.rank]: 1.0} if holds else {}, local=1.0)
        if holds:
            add_grad(rank.module.get_parameter(names[fabric.rank]), {0: 2.0, 3: 3.0}[fabric.rank])
        add_grad(rank.local, 6.0)
        rank.opt.finalize_grads()
        norm = rank.opt.clip_grad_norm_(1e6)
        rank.opt.step()
        rank.opt.zero_grad()
        rank.own.check()
        rank.own.sync()
        rank.opt.load_state_dict(rank.opt.state_dict())
        value = rank.module.get_parameter(names[fabric.rank]).item() if holds else 0.5
        rank.own.close()
        assert rank.local.item() == near(0.4)
        return value, rank.opt.stats.sent.total - rank.opt.stats.sent.other, float(norm)

    norm = near(13.0)  # 4 * 6**2 + 5**2 = 13**2
    assert ranks(4, work) == [(HALF, 8, norm), (0.5, 0, norm), (0.5, 0, norm), (HALF, 8, norm)]


def test_case_18_three_holders_add_in_one_order_wherever_the_owner() -> None:
    names = ("a.w", "b.w", "c.w")
    shares = (1e16, 1.0, -1e16)

    def work(fabric: Fabric, owner: int) -> float:
        rank = Rank(fabric, values={names[fabric.rank]: 1.0}, ties=[names], assign={"owner": owner}, lr=1.0)
        parameter = rank.module.get_parameter(names[fabric.rank])
        add_grad(parameter, shares[fabric.rank])
        rank.opt.step()
        assert rank.own.check()
        return parameter.item()

    for owner in range(3):
        # (1e16 + 1) - 1e16 is 0 in float64, in ascending order of the ranks.
        assert ranks(3, partial(work, owner=owner)) == [1.0, 1.0, 1.0]


def test_case_21_and_47_padding_and_sparse_lookup() -> None:
    def stage(rank: int, *, sparse: bool) -> nn.ModuleDict:
        if rank == 0:
            return nn.ModuleDict({"embed": nn.Embedding(4, 2, padding_idx=0, sparse=sparse)})
        return nn.ModuleDict({"head": nn.Linear(2, 4, bias=False)})

    def work(fabric: Fabric, *, sparse: bool) -> tuple[list[float], float]:
        module = stage(fabric.rank, sparse=sparse).double()
        with torch.no_grad():
            next(module.parameters()).fill_(1.0)
        own = assign_over(fabric, module, TIE)
        opt = OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        if fabric.rank == 0:
            module["embed"](torch.tensor([0, 1, 1, 2])).sum().backward()
        else:
            module["head"](torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        norm = opt.clip_grad_norm_(1e6)
        opt.step()
        own.check()
        return next(module.parameters())[:, 0].tolist(), float(norm)

    for sparse in (False, True):
        expected = [0.9, 0.7, 0.8, 0.9]  # the head's 1 each, the lookup's 0, 2, 1, 0
        norm = math.sqrt(2 * (1 + 9 + 4 + 1))
        for row, found in ranks(2, partial(work, sparse=sparse)):
            assert row == near(expected)
            assert found == near(norm)


def test_case_22_a_bias_stays_local() -> None:
    def work(fabric: Fabric) -> tuple[int, int]:
        values: dict[str, float | Tensor] = {NAMES[fabric.rank]: 1.0}
        if fabric.rank == 1:
            values["head.bias"] = 1.0
        rank = Rank(fabric, values=values)
        rank.backward()
        if fabric.rank == 1:
            add_grad(rank.module.get_parameter("head.bias"), 5.0)
        rank.opt.step()
        if fabric.rank == 1:
            assert rank.module.get_parameter("head.bias").item() == 0.5
        return rank.opt.stats.sent.grads, rank.opt.stats.sent.weights

    assert ranks(2, work) == [(0, 8), (8, 0)]


def test_case_23_unlike_options_are_named_on_both_ranks() -> None:
    def params(rank: int) -> Callable[[nn.Module], Any]:
        return lambda module: [{"params": module.parameters(), "weight_decay": [0.0, 0.1][rank]}]

    for error in errors(2, lambda f: Rank(f, torch.optim.AdamW, params=params(f.rank))):
        assert isinstance(error, TieError)
        for part in (NAMES[0], "weight_decay is 0.0 on rank 0", "0.1 on rank 1"):
            assert part in str(error)


@pytest.mark.parametrize(
    "options",
    [
        (dict(lr=0.1), dict(lr=0.2)),
        (dict(grad_dtype=torch.float32), {}),
        (dict(master_dtype=torch.float64), {}),
    ],
    ids=["lr", "grad_dtype", "master_dtype"],
)
def test_case_23_other_unlike_options(options: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for error in errors(2, lambda f: Rank(f, dtype=torch.float32, **options[f.rank])):
        assert isinstance(error, TieError)
        assert next(iter(options[0])) in str(error)


def test_case_23_another_class_on_one_rank() -> None:
    kinds: list[Optimizers] = [torch.optim.Adam, torch.optim.AdamW]
    for error in errors(2, lambda f: Rank(f, kinds[f.rank])):
        assert isinstance(error, TieError)
        assert "rank 1" in str(error)


# -- norm, clip, accounting


@pytest.mark.parametrize(
    ("local", "kind", "norm"),
    [(None, 2.0, 5.0), (12.0, 2.0, 13.0), (12.0, math.inf, 12.0), (None, math.inf, 5.0), (12.0, 1.0, 17.0)],
)
def test_case_24_the_global_norm(local: float | None, kind: float, norm: float) -> None:
    def work(fabric: Fabric) -> float:
        rank = Rank(fabric, local=1.0)
        rank.backward()
        if rank.rank == 1:
            add_grad(rank.local, local)
        found = rank.opt.clip_grad_norm_(1e9, kind)
        assert found.dtype == torch.float64
        assert found.dim() == 0
        return float(found)

    assert ranks(2, work) == [near(norm)] * 2


def test_case_24_clipping_scales_every_gradient() -> None:
    def work(fabric: Fabric) -> tuple[float, float]:
        rank = Rank(fabric, local=1.0)
        rank.backward()
        if rank.rank == 1:
            add_grad(rank.local, 12.0)
        rank.opt.clip_grad_norm_(1.0)
        rank.opt.step()
        return rank.value(), rank.local.item()

    tied = near(0.961538, 1e-6)
    assert ranks(2, work) == [(tied, 1.0), (tied, near(1 - 1.2 / 13, 1e-6))]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", [2.0, math.inf])
def test_case_24_a_bad_gradient_shows_on_every_rank_and_all_may_skip(bad: float, kind: float) -> None:
    def work(fabric: Fabric) -> tuple[float, float]:
        rank = Rank(fabric, local=1.0)
        for step in range(2):
            rank.backward()
            if rank.rank == 1:
                add_grad(rank.local, bad if step == 0 else None)
            norm = rank.opt.clip_grad_norm_(1e9, kind)
            if not math.isfinite(norm):
                rank.opt.zero_grad()
                continue
            rank.opt.step()
        return rank.value(), rank.own.step

    assert ranks(2, work) == [(HALF, 2), (HALF, 2)]


def test_case_25_embedding_only_and_head_only_stages_return() -> None:
    def work(fabric: Fabric) -> float:
        rank = Rank(fabric, assign={"owner": 1})
        rank.backward()
        rank.opt.clip_grad_norm_(100.0)
        rank.opt.step()
        return rank.value()

    assert ranks(2, work) == [HALF, HALF]


def test_case_26_state_of_the_tie_lives_on_one_rank() -> None:
    def work(fabric: Fabric) -> tuple[int, int, int]:
        rank = Rank(fabric, torch.optim.Adam, values={NAMES[fabric.rank]: torch.zeros(1000, 8)})
        rank.step()
        counted = sum(p.numel() for group in rank.opt.param_groups for p in group["params"])
        return counted, state_bytes(rank.opt, rank.weight), len(rank.opt.state)

    assert ranks(2, work) == [(8000, 2 * 8000 * 8 + 4, 1), (0, 0, 0)]


def test_case_27_gradients_of_other_shapes_in_a_row() -> None:
    def work(fabric: Fabric) -> list[float]:
        rank = Rank(fabric, values={NAMES[fabric.rank]: torch.ones(4, 2)})
        for length in (3, 5):
            ids = torch.arange(length) % 4
            if fabric.rank == 0:
                torch.nn.functional.embedding(ids, rank.weight).sum().backward()
            else:
                (torch.ones(length, 2, dtype=torch.float64) @ rank.weight.T).sum().backward()
            rank.opt.step()
            rank.opt.zero_grad()
        rank.own.check()
        return rank.weight[:, 0].tolist()

    expected = near([1 - 0.1 * (8 + n) for n in (3, 2, 2, 1)])
    assert ranks(2, work) == [expected, expected]


# -- master weights and dtypes


def test_case_12_fp16_sums_need_masters() -> None:
    def work(fabric: Fabric, master: torch.dtype | None) -> float:
        rank = Rank(fabric, dtype=torch.float16, grads=(40000.0, 40000.0), master_dtype=master, lr=1e-5)
        rank.backward()
        norm = rank.opt.clip_grad_norm_(math.inf)
        rank.opt.zero_grad()
        return float(norm)

    assert ranks(2, lambda f: work(f, torch.float32)) == [80000.0, 80000.0]
    assert ranks(2, lambda f: work(f, None)) == [math.inf, math.inf]


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
@pytest.mark.parametrize("clip", [False, True])
def test_masters_step_like_a_float32_optimizer_on_the_owner_alone(
    kind: Optimizers, narrow: torch.dtype, clip: bool
) -> None:
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(70, 3, generator=generator).to(narrow)
    draws = [torch.randn(2, 70, 3, generator=generator).to(narrow) for _ in range(3)]
    options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def work(fabric: Fabric) -> tuple[Tensor, list[tuple[torch.dtype, int]], Tensor | None]:
        rank = Rank(
            fabric,
            kind,
            values={NAMES[fabric.rank]: start},
            dtype=narrow,
            master_dtype=torch.float32,
            assign={"chunk_bytes": 256},
            **options,
        )
        for draw in draws:
            add_grad(rank.weight, draw[fabric.rank])
            if clip:
                rank.opt.clip_grad_norm_(1e9)
            rank.opt.step()
            rank.opt.zero_grad()
            assert rank.own.check()
        state = rank.opt.state.get(rank.weight, {})
        return (
            rank.weight.detach(),
            [(v.dtype, v.numel()) for v in state.values() if isinstance(v, Tensor) and v.dim()],
            state.get("master"),
        )

    alone = nn.Parameter(start.float())
    bare = kind([alone], lr=0.1, **options)
    for draw in draws:
        alone.grad = draw[0].float() + draw[1].float()
        bare.step()
    (owner, state, master), (replica, nothing, none) = ranks(2, work)
    assert master is not None
    assert torch.equal(master, alone.detach())
    assert torch.equal(owner, alone.detach().to(narrow))
    assert torch.equal(replica, owner)
    assert {dtype for dtype, _ in state} == {torch.float32}
    assert nothing == []
    assert none is None


def test_masters_of_local_parameters_and_of_float64() -> None:
    def work(fabric: Fabric) -> tuple[float, float, set[torch.dtype]]:
        rank = Rank(fabric, dtype=torch.bfloat16, master_dtype=torch.float64, local=1.0, lr=2.0**-12)
        for _ in range(2):
            rank.backward()
            add_grad(rank.local, 1.0)
            rank.opt.step()
            rank.opt.zero_grad()
        masters = [state["master"] for state in rank.opt.state.values()]
        # bfloat16 has 8 bits: a step of 2**-12 changes the master alone.
        return rank.local.item(), min(map(float, masters)), {m.dtype for m in masters}

    owner, replica = ranks(2, work)
    assert owner == (1.0, 1 - 2 * 5 * 2.0**-12, {torch.float64})
    assert replica == (1.0, 1 - 2 * 2.0**-12, {torch.float64})


def test_float64_parameters_keep_their_own_dtype_under_float32_masters() -> None:
    def work(fabric: Fabric) -> tuple[float, bool]:
        rank = Rank(fabric, torch.optim.Adam, master_dtype=torch.float32)
        rank.step()
        return rank.value(), any("master" in state for state in rank.opt.state.values())

    assert ranks(2, work) == [(near(0.9, 1e-6), False)] * 2


@pytest.mark.parametrize(
    ("wire", "size"), [(None, 4), (torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)]
)
def test_grad_dtype_is_that_of_the_wire(wire: torch.dtype | None, size: int) -> None:
    def work(fabric: Fabric) -> tuple[int, float]:
        rank = Rank(fabric, dtype=torch.float32, grad_dtype=wire)
        rank.step()
        return rank.opt.stats.sent.grads, rank.value()

    half = near(0.5, 1e-6)
    assert ranks(2, work) == [(0, half), (size, half)]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    ("dtype", "wire"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_gradient_and_weights_of_unlike_dtypes_travel_in_the_same_chunks(
    dtype: torch.dtype, wire: torch.dtype, clips: bool
) -> None:
    value = torch.linspace(-1, 1, 500 * 6).view(500, 6)

    def work(fabric: Fabric) -> float:
        rank = Rank(
            fabric,
            values={NAMES[fabric.rank]: value},
            dtype=dtype,
            assign={"chunk_bytes": 64 * 6 * 4},
            master_dtype=torch.float32,
            grad_dtype=wire,
        )
        rank.backward()
        if clips:
            rank.opt.clip_grad_norm_(1e9)
        rank.opt.step()
        assert rank.own.check()
        return float((rank.weight.detach().float() - (value - 0.5)).abs().max())

    assert ranks(2, work) == [near(0.0, 0.01)] * 2


def test_case_39_unlike_shapes_and_dtypes_are_refused_on_both() -> None:
    pairs = [
        (torch.zeros(5, 2), torch.zeros(3, 2)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2).bfloat16()),
    ]

    def work(fabric: Fabric, pair: tuple[Tensor, Tensor]) -> None:
        tensor = pair[fabric.rank]
        assign_over(fabric, Weights({NAMES[fabric.rank]: tensor}, dtype=tensor.dtype), TIE)

    for pair in pairs:
        for error in errors(2, partial(work, pair=pair)):
            assert isinstance(error, TieError)
            for part in (*NAMES, "rank 0", "rank 1"):
                assert part in str(error)


def test_case_42_the_default_dtype_does_not_matter() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = ranks(2, lambda f: _one_step(f, dtype=torch.float32))
    finally:
        torch.set_default_dtype(before)
    assert found == [near(0.5, 1e-6)] * 2


def _one_step(fabric: Fabric, **options: Any) -> float:  # noqa: ANN401
    rank = Rank(fabric, **options)
    rank.step()
    return rank.value()


# -- checkpoints, at the level of the optimizer


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adafactor])
def test_case_34_step_save_load_step_is_two_steps_bit_for_bit(kind: Optimizers, narrow: torch.dtype) -> None:
    start = torch.linspace(-2, 2, 12).view(4, 3)

    def make(fabric: Fabric) -> Rank:
        return Rank(
            fabric,
            kind,
            values={NAMES[fabric.rank]: start},
            local=1.0,
            dtype=narrow,
            master_dtype=torch.float32,
            grads=(torch.linspace(0, 3, 12).view(4, 3), torch.linspace(1, -2, 12).view(4, 3)),
        )

    def step(rank: Rank) -> None:
        add_grad(rank.local, 0.3)
        rank.step()

    def work(fabric: Fabric) -> None:
        straight = make(fabric)
        step(straight)
        weights = {k: v.clone() for k, v in straight.module.state_dict().items()}
        saved = straight.opt.state_dict()
        copied = {
            "state": {
                i: {k: v.clone() if isinstance(v, Tensor) else v for k, v in s.items()}
                for i, s in saved["state"].items()
            },
            "param_groups": saved["param_groups"],
        }
        step(straight)
        resumed = make(fabric)
        resumed.module.load_state_dict(weights)
        resumed.opt.load_state_dict(copied)
        assert resumed.own.check()
        step(resumed)
        for one, two in zip(straight.module.parameters(), resumed.module.parameters(), strict=True):
            assert torch.equal(one, two)
        for one, two in zip(straight.opt.state.values(), resumed.opt.state.values(), strict=True):
            assert one.keys() == two.keys()
            for key in one:
                if isinstance(one[key], Tensor):
                    assert one[key].dtype == two[key].dtype
                    assert torch.equal(one[key], two[key]), key

    ranks(2, work)


def test_sync_after_loading_weights_also_refills_masters() -> None:
    def work(fabric: Fabric) -> tuple[float, float]:
        rank = Rank(fabric, dtype=torch.bfloat16, master_dtype=torch.float32, local=1.0)
        rank.step()
        with torch.no_grad():
            rank.weight.fill_(2.0 if fabric.rank == 0 else 9.0)
            rank.local.fill_(3.0)
        rank.own.sync()
        assert rank.value() == 2.0
        rank.backward()
        add_grad(rank.local, 10.0)
        rank.opt.step()
        return rank.value(), rank.local.item()

    assert ranks(2, work) == [(1.5, 2.0), (1.5, 2.0)]


def test_a_load_before_any_step_takes_the_weights_that_are_there() -> None:
    def work(fabric: Fabric) -> float:
        rank = Rank(fabric, dtype=torch.bfloat16, master_dtype=torch.float32)
        empty = rank.opt.state_dict()
        with torch.no_grad():
            rank.weight.fill_(2.0)
        rank.opt.load_state_dict(empty)
        rank.step()
        return rank.value()

    assert ranks(2, work) == [1.5, 1.5]


def test_case_36_a_replica_that_was_written_to_is_found() -> None:
    def work(fabric: Fabric) -> None:
        rank = Rank(fabric)
        rank.step()
        if fabric.rank == 1:
            with torch.no_grad():
                rank.weight.add_(0.25)
        rank.own.check()

    for error in errors(2, work):
        assert isinstance(error, ReplicaMismatchError)
        assert "0.25" in str(error)
        assert NAMES[0] in str(error)


def test_load_state_dict_that_fits_on_one_rank_only_fails_on_both() -> None:
    def work(fabric: Fabric) -> None:
        rank = Rank(fabric, torch.optim.Adam, local=1.0)
        rank.step()
        state = rank.opt.state_dict()
        if fabric.rank == 1:
            state["param_groups"].append(dict(state["param_groups"][0]))
        rank.opt.load_state_dict(state)

    found = errors(2, work)
    assert "rank 1" in str(found[0])
    assert "the saved groups" in str(found[0])
    assert "the saved groups" in str(found[1])


# -- ranks that do not keep in step


def test_a_rank_that_takes_fewer_steps_fails_both() -> None:
    def work(fabric: Fabric) -> None:
        rank = Rank(fabric)
        for _ in range(3 if fabric.rank == 0 else 2):
            rank.step()
        rank.opt.clip_grad_norm_(1.0)

    for error in errors(2, work, timeout=1.0):
        assert isinstance(error, ExchangeError)
        assert "step 2" in str(error)
        assert "rank 1" in str(error)


@pytest.mark.parametrize("skipping", [0, 1])
def test_a_rank_that_skips_after_clipping_fails_both(skipping: int) -> None:
    def work(fabric: Fabric) -> None:
        rank = Rank(fabric)
        for step in range(3):
            rank.backward()
            rank.opt.clip_grad_norm_(1.0)
            if not (step == 1 and fabric.rank == skipping):
                rank.opt.step()
            rank.opt.zero_grad()

    for error in errors(2, work, timeout=1.0):
        assert isinstance(error, ExchangeError)
        # Who waits for whom decides what is seen first.
        assert NAMES[0] in str(error) or "the global norm of step 2" in str(error)


def test_different_steps_are_named_by_rank() -> None:
    def work(fabric: Fabric) -> None:
        rank = Rank(fabric, values={}, local=1.0, ties=())
        for _ in range(3 - fabric.rank):
            rank.opt.step()
        rank.opt.clip_grad_norm_(1.0)

    for error in errors(2, work):
        assert isinstance(error, MessageMismatchError)
        assert "rank 0 in 3, rank 1 in 2" in str(error)


def test_a_backward_after_the_exchange_is_refused() -> None:
    def work(fabric: Fabric) -> None:
        rank = Rank(fabric)
        rank.backward()
        rank.opt.finalize_grads()
        rank.backward()
        rank.opt.step()

    found = errors(2, work)
    assert "a backward ran on rank 1 after its gradient had been exchanged" in str(found[1])
    assert "a backward ran on rank 1" in str(found[0])  # the owner learns it from the board


def test_a_tie_listed_on_one_rank_only_is_an_error_on_all() -> None:
    def params(rank: int) -> Callable[[nn.Module], Any]:
        return lambda module: list(module.parameters()) if rank == 0 else []

    for error in errors(3, lambda f: Rank(f, params=params(f.rank))):
        assert isinstance(error, TieError)
        assert "on the ranks [0] and not on the ranks [1]" in str(error)


def test_a_tie_in_two_optimizers_is_an_error_on_all() -> None:
    def work(fabric: Fabric) -> None:
        rank = Rank(fabric)
        OwnerOptimizer(rank.module.parameters(), torch.optim.SGD, ownership=rank.own, lr=0.1)

    for error in errors(2, work):
        assert isinstance(error, ConfigError)
        assert "another OwnerOptimizer" in str(error)


def test_two_optimizers_share_an_ownership_tie_by_tie() -> None:
    ties = (("a.w", "b.w"), ("c.w", "d.w"))

    def work(fabric: Fabric) -> list[float]:
        names = [names[fabric.rank] for names in ties]
        module = Weights({name: 1.0 for name in names})
        own = assign_over(fabric, module, ties)
        parameters = [module.get_parameter(name) for name in names]
        optimizers = [
            OwnerOptimizer([parameters[0]], torch.optim.SGD, ownership=own, lr=0.1),
            OwnerOptimizer([parameters[1]], torch.optim.SGD, ownership=own, lr=0.2),
        ]
        for _ in range(2):
            for parameter, optimizer in zip(parameters, optimizers, strict=True):
                add_grad(parameter, 2.0 + fabric.rank)
                optimizer.clip_grad_norm_(100.0)
                optimizer.step()
                optimizer.zero_grad()
        own.check()
        return [p.item() for p in parameters]

    expected = near([0.0, -1.0])
    assert ranks(2, work) == [expected, expected]


def test_step_after_close_says_so() -> None:
    def work(fabric: Fabric) -> None:
        rank = Rank(fabric)
        rank.own.close()
        rank.own.close()
        rank.step()

    for error in errors(2, work):
        assert isinstance(error, PeerLostError)
        assert "closed" in str(error)


# -- against two copies


def test_half_the_state_of_two_copies_and_the_same_weights() -> None:
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    draws = [torch.randn(2, 40, 4, generator=generator, dtype=torch.float64) for _ in range(10)]

    def work(fabric: Fabric) -> tuple[Tensor, int, Tensor, int, tuple[int, int]]:
        rank = Rank(
            fabric, torch.optim.AdamW, values={NAMES[fabric.rank]: start}, assign={"chunk_bytes": 512}
        )
        copied = nn.Parameter(start.clone())
        bare = torch.optim.AdamW([copied], lr=0.1)
        group = fabric.group((0, 1), "copies")
        sent = (0, 0)
        for draw in draws:
            share = draw[fabric.rank]
            add_grad(rank.weight, share)
            rank.opt.step()
            rank.opt.zero_grad()
            sent = (rank.opt.stats.sent.grads, rank.opt.stats.sent.weights)
            copied.grad = share.clone()
            group.all_reduce(copied.grad)
            bare.step()
        mine = sum(state_bytes(rank.opt, p) for p in rank.module.parameters())
        return rank.weight.detach(), mine, copied.detach(), state_bytes(bare, copied), sent

    first, second = ranks(2, work)
    for weight, _, copied, _, _ in (first, second):
        assert float((weight - copied).abs().max()) <= 1e-12
    assert 2 * (first[1] + second[1]) == first[3] + second[3]
    size = start.nbytes
    assert first[4] == (0, size)  # one weight transfer
    assert second[4] == (size, 0)  # one gradient transfer


def test_an_all_zero_first_step_of_a_warm_up_is_exchanged() -> None:
    """A first lr of 0 and gradients of zero look like the checkpoint's state-making step."""

    def work(fabric: Fabric) -> tuple[int, float]:
        rank = Rank(fabric, torch.optim.Adam, grads=(0.0, 0.0))
        schedule = torch.optim.lr_scheduler.LambdaLR(rank.opt, lambda step: step / 2)
        rank.step()
        schedule.step()
        assert float(rank.opt.param_groups[0]["lr"]) == 0.05
        rank.grad = 3.0
        rank.step()
        return rank.own.step, rank.value()

    (steps, owner), (other_steps, replica) = ranks(2, work)
    assert steps == other_steps == 2
    assert owner == replica < 1.0
