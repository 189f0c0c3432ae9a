"""One tie in pipelines side by side: an owner in each, whose gradients are averaged, or one for all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch
from owners import NAMES, TIE, TIMEOUT, Weights, add_grad, near
from tiny import one_torch_thread
from torch import Tensor, nn

from piper_owner.assignment import Ownership, assign_over
from piper_owner.data_parallel import SideGroup
from piper_owner.errors import (
    ConfigError,
    ExchangeError,
    MessageMismatchError,
    ReplicaMismatchError,
    TieError,
)
from piper_owner.executor.local import run_threads
from piper_owner.grad_scaler import GradScaler
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.transport import Fabric, MemoryNetwork

if TYPE_CHECKING:
    pass

T = TypeVar("T")

SCOPES = ("pipeline", "global")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


class Place:
    """One rank of `dp` pipelines of `pp` ranks, and what it trains."""

    def __init__(self, dp: int, pp: int, index: int, rank: int, fabric: Fabric, side: Fabric) -> None:
        self.dp, self.pp, self.index, self.rank = dp, pp, index, rank
        self.fabric, self.side = fabric, side

    def train(
        self,
        values: dict[str, float | Tensor],
        *,
        scope: str,
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        ties: Sequence[Sequence[str]] = TIE,
        dtype: torch.dtype = torch.float64,
        owner: str | int = "auto",
        chunk_bytes: int = 64,
        **options: Any,  # noqa: ANN401 - the options of any optimizer
    ) -> None:
        self.module = Weights(values, dtype=dtype)
        self.own: Ownership = assign_over(
            self.fabric,
            self.module,
            ties,
            owner=owner,  # type: ignore[arg-type]
            scope=scope,
            side=lambda: SideGroup(fabric=self.side),
            chunk_bytes=chunk_bytes,
        )
        self.opt = OwnerOptimizer(
            self.module.parameters(), kind, ownership=self.own, **{"lr": 0.1, **options}
        )

    @property
    def num_states(self) -> int:
        """Parameters that the optimizer here steps."""
        return sum(len(group["params"]) for group in self.opt.param_groups)


def grid(dp: int, pp: int, work: Callable[[Place], T], *, timeout: timedelta = TIMEOUT) -> list[T]:
    """What `work` returns on every rank, pipeline by pipeline."""
    pipelines = [MemoryNetwork(pp, timeout=timeout) for _ in range(dp)]
    sides = [MemoryNetwork(dp, timeout=timeout) for _ in range(pp)]

    def run(fabric: Fabric) -> T:
        index, rank = divmod(fabric.rank, pp)
        return work(Place(dp, pp, index, rank, pipelines[index].fabric(rank), sides[rank].fabric(index)))

    return run_threads(dp * pp, run, timeout=timeout)


def grid_errors(dp: int, pp: int, work: Callable[[Place], object]) -> list[BaseException]:
    """The error of every rank; all of them must fail."""

    def guarded(place: Place) -> BaseException:
        try:
            work(place)
        except Exception as error:  # the test looks at it
            return error
        raise AssertionError(f"rank {place.rank} of pipeline {place.index} went on")

    return grid(dp, pp, guarded, timeout=timedelta(seconds=2))


def held(place: Place, last: int | None = None) -> dict[str, float | Tensor]:
    """The tied weight on the first and the last rank."""
    last = place.pp - 1 if last is None else last
    return {NAMES[0 if place.rank == 0 else 1]: 1.0} if place.rank in (0, last) else {}


def tied(place: Place) -> nn.Parameter | None:
    return next(iter(place.module.parameters()), None)


# -- case 4: gradients 1, 2 on the first stage, 3, 4 on the last


def case_four(scope: str, shape: tuple[int, ...], factor: float, **arguments: Any) -> list[Any]:  # noqa: ANN401
    def work(place: Place) -> tuple[float, int, int]:
        place.train({NAMES[place.rank]: torch.ones(shape)}, scope=scope, **arguments)
        weight = tied(place)
        assert weight is not None
        add_grad(weight, factor * (1.0 + place.index + 2 * place.rank))
        place.opt.step()
        assert place.own.check()
        assert bool((weight == weight.flatten()[0]).all())
        return float(weight.detach().flatten()[0]), place.num_states, place.opt.stats.sent.grads

    return grid(2, 2, work)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("shape", [(), (5, 2), (4,), (257, 3)], ids=str)
@pytest.mark.parametrize(("factor", "grad"), [(2.0, 10.0), (1.0, 5.0)], ids=["sum", "mean"])
@pytest.mark.parametrize("owner", ["auto", "last"])
def test_case_04(scope: str, shape: tuple[int, ...], factor: float, grad: float, owner: str) -> None:
    found = case_four(scope, shape, factor, owner=owner)
    assert [weight for weight, _, _ in found] == [near(1 - 0.1 * grad)] * 4
    per_pipeline = [1, 0] if owner == "auto" else [0, 1]
    others = [0, 0] if scope == "global" else per_pipeline
    assert [states for _, states, _ in found] == [*per_pipeline, *others]


def test_bytes_of_a_step() -> None:
    """One gradient inside a pipeline, and a ring, or one gradient from each holder that does not step."""
    nbytes = 257 * 3 * 8
    sent = {scope: [each[2] for each in case_four(scope, (257, 3), 1.0)] for scope in SCOPES}
    assert sent["pipeline"] == [nbytes, nbytes] * 2
    assert sent["global"] == [0, nbytes, nbytes, nbytes]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("dp", "pp"), [(3, 2), (2, 3), (3, 3), (1, 2), (2, 1)])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_any_grid_and_two_ties_are_one_process(
    scope: str, dp: int, pp: int, kind: type[torch.optim.Optimizer]
) -> None:
    """Two ties, owned by each other's replica; with one rank they meet there and no message is needed."""
    ties = (NAMES, ("norm.weight", "tail.weight"))
    start = {"embed.weight": torch.linspace(-1, 1, 21).view(7, 3), "norm.weight": torch.tensor([0.5, 2.0])}
    alike = {"lr": 0.05, "weight_decay": 0.1}

    def grad(step: int, index: int, rank: int, number: int, weight: Tensor) -> Tensor:
        return torch.sin(weight.detach() * (1 + step) + index + 3 * rank + number)

    def work(place: Place) -> list[Tensor]:
        last = place.pp - 1
        values: dict[str, float | Tensor] = {}
        for number, names in enumerate(ties):
            for name, rank in ((names[0], 0), (names[1], last)):
                if place.rank == rank:
                    values[name] = start[ties[number][0]]
        owners = {"embed.weight": 0, "norm.weight": last}
        place.train(values, scope=scope, ties=ties, kind=kind, owner=owners, **alike)  # type: ignore[arg-type]
        for step in range(5):
            for number, names in enumerate(ties):
                for name, rank in ((names[0], 0), (names[1], last)):
                    if place.rank == rank:
                        weight = place.module.get_parameter(name)
                        add_grad(weight, grad(step, place.index, int(name == names[1]), number, weight))
            place.opt.step()
            place.opt.zero_grad()
            assert place.own.check()
        return [
            place.own.exchange.tied[names[0]].parameter.detach() for names in ties if place.rank in (0, last)
        ]

    alone = [nn.Parameter(start[names[0]].double()) for names in ties]
    reference = kind(alone, **alike)  # type: ignore[arg-type]
    for step in range(5):
        for number, weight in enumerate(alone):
            parts = [grad(step, i, r, number, weight) for i, r in itertools.product(range(dp), range(2))]
            weight.grad = torch.stack(parts).sum(0) / dp
        reference.step()
    for found in grid(dp, pp, work):
        for mine, right in zip(found, alone, strict=False):
            assert torch.allclose(mine, right, rtol=0, atol=1e-10)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("clip", [False, True])
def test_masters_and_wide_gradients(scope: str, clip: bool) -> None:
    """Two bfloat16 gradients whose mean needs more bits than bfloat16 has."""

    def work(place: Place) -> tuple[float, float]:
        place.train(
            held(place), scope=scope, dtype=torch.bfloat16, kind=torch.optim.SGD,
            master_dtype=torch.float32, grad_dtype=torch.float32, lr=1.0,
        )  # fmt: skip
        weight = tied(place)
        assert weight is not None
        add_grad(weight, [[256.0, 1.0], [1.0, 1.0]][place.index][place.rank])
        if clip:
            place.opt.clip_grad_norm_(1e9)
        place.opt.step()
        assert place.own.check()
        states = [state["master"].item() for state in place.opt.state_dict()["state"].values()]
        return weight.item(), states[0] if states else math.nan

    found = grid(2, 2, work)
    assert [weight for weight, _ in found] == [-128.0] * 4
    masters = [master for _, master in found if not math.isnan(master)]
    assert masters == [1.0 - 129.5] * (1 if scope == "global" else 2)


@pytest.mark.parametrize("scope", SCOPES)
def test_case_08_none_is_not_zeros_and_a_missing_share_counts_as_zeros(scope: str) -> None:
    grads: list[dict[tuple[int, int], float]] = [{(0, 0): 1.0, (1, 1): 1.0}, {}, {(1, 1): 2.0}, {(1, 0): 2.0}]

    def work(place: Place) -> list[float]:
        place.train(held(place), scope=scope, kind=torch.optim.Adam)
        weight = tied(place)
        assert weight is not None
        values = []
        for each in grads:
            add_grad(weight, each.get((place.index, place.rank)))
            place.opt.step()
            if not each:
                assert (place.opt.stats.sent.grads, place.opt.stats.sent.weights) == (0, 0)
            place.opt.zero_grad()
            assert place.own.check()
            values.append(weight.item())
        return values

    alone = nn.Parameter(torch.ones(1, dtype=torch.float64))
    reference = torch.optim.Adam([alone], lr=0.1)
    right = []
    for each in grads:
        alone.grad = torch.full((1,), sum(each.values()) / 2, dtype=torch.float64) if each else None
        reference.step()
        right.append(alone.item())
    assert right[0] == right[1]
    assert grid(2, 2, work) == [near(right)] * 4


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("kind", "norm"), [(2.0, 13.0), (math.inf, 12.0), (1.0, 17.0)])
def test_case_24_the_tie_counts_once_everywhere(scope: str, kind: float, norm: float) -> None:
    """Combined 5, and 12 in a weight of the last stage, which DDP would give both pipelines."""

    def work(place: Place) -> tuple[float, float]:
        values = {NAMES[place.rank]: 1.0} | ({"own.weight": 0.0} if place.rank else {})
        place.train(values, scope=scope)  # type: ignore[arg-type]
        add_grad(place.module.get_parameter(NAMES[place.rank]), 1.0 + place.index + 2 * place.rank)
        if place.rank:
            add_grad(place.module.get_parameter("own.weight"), 12.0)
        total = float(place.opt.clip_grad_norm_(1.0, kind))
        place.opt.step()
        assert place.own.check()
        return total, place.module.get_parameter(NAMES[place.rank]).item()

    assert grid(2, 2, work) == [(near(norm), near(1 - 0.5 / norm, 1e-6))] * 4


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("where", [(1, 0), (1, 1), (0, 1)])
def test_case_28_an_infinity_in_any_pipeline_skips_the_step_of_all(
    scope: str, where: tuple[int, int]
) -> None:
    def work(place: Place) -> tuple[float, float, float]:
        place.train({**held(place), "own.weight": 1.0}, scope=scope)
        scaler = GradScaler("cpu", init_scale=8.0)
        weight, own = place.module.get_parameter(NAMES[place.rank]), place.module.get_parameter("own.weight")
        values = []
        for step in range(2):
            bad = math.inf if step == 0 and (place.index, place.rank) == where else 1.0
            add_grad(weight, 8.0 / (step + 1) * bad * (1.0 + place.index + 2 * place.rank))
            add_grad(own, 8.0 / (step + 1))
            scaler.step(place.opt)
            scaler.update()
            place.opt.zero_grad()
            values.append(weight.item())
        assert place.own.check()
        return values[0], values[1], scaler.get_scale()

    assert grid(2, 2, work) == [(1.0, near(0.5), 4.0)] * 4


@pytest.mark.parametrize("scope", SCOPES)
def test_accumulation_and_an_early_exchange(scope: str) -> None:
    """With one owner for all the gradient is not sent before it is reduced."""

    def work(place: Place) -> float:
        place.train(held(place), scope=scope)
        weight = tied(place)
        assert weight is not None
        for part in range(4):
            if part == 3:
                place.opt.begin_exchange()
            add_grad(weight, (1.0 + place.index + 2 * place.rank) / 4)
        place.opt.send_early({NAMES[0]})
        with pytest.raises(ConfigError, match="second backward"):
            place.opt.begin_exchange()
        place.opt.step()
        assert place.own.check()
        return weight.item()

    assert grid(2, 2, work) == [near(0.5)] * 4


@pytest.mark.parametrize("scope", SCOPES)
def test_copies_start_equal_and_stay_so_after_sync_and_load(scope: str) -> None:
    def work(place: Place) -> list[float]:
        values: dict[str, float | Tensor] = {NAMES[place.rank]: 1.0 + 10 * place.index + place.rank}
        place.train(values, scope=scope, kind=torch.optim.Adam)
        weight = tied(place)
        assert weight is not None
        found = [weight.item()]
        with torch.no_grad():
            weight.fill_(5.0 + place.index + 2 * place.rank)
        place.own.sync()
        found.append(weight.item())
        add_grad(weight, 1.0)
        place.opt.step()
        state, before = place.opt.state_dict(), weight.item()
        with torch.no_grad():
            weight.fill_(before + place.index)
        place.opt.load_state_dict(state)
        assert weight.item() == before
        assert place.own.check()
        return found

    with pytest.warns(UserWarning, match="was taken") as caught:
        assert grid(2, 2, work) == [[1.0, 5.0]] * 4
    texts = [str(each.message) for each in caught]
    assert len(texts) == 3
    assert sum("of pipeline 1 differed from that of pipeline 0 by up to 1" in text for text in texts) == 2


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("where", [(1, 0), (1, 1), (0, 1), (1, None)], ids=str)
def test_a_copy_that_differs_is_found_on_every_rank(scope: str, where: tuple[int, int | None]) -> None:
    """Also a pipeline whose own copies are equal."""

    def work(place: Place) -> None:
        place.train(held(place), scope=scope)
        if place.index == where[0] and where[1] in (None, place.rank):
            with torch.no_grad():
                next(place.module.parameters()).add_(0.25)
        place.own.check()

    for error in grid_errors(2, 2, work):
        assert isinstance(error, ReplicaMismatchError)
        assert "embed.weight" in str(error)
        assert "0.25" in str(error)


@pytest.mark.parametrize("scope", SCOPES)
def test_ranks_in_different_steps_are_told(scope: str) -> None:
    def work(place: Place) -> None:
        place.train(held(place), scope=scope)
        place.own.step += place.index
        add_grad(next(place.module.parameters()), 1.0)
        place.opt.step()

    found = grid_errors(2, 2, work)
    assert any(isinstance(error, MessageMismatchError) for error in found)
    assert all(isinstance(error, ExchangeError) for error in found)
    assert any("step is 1, expected 0" in str(error) and "embed.weight" in str(error) for error in found)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("everywhere", [False, True])
def test_case_09_a_tie_frozen_in_one_pipeline_or_in_all(scope: str, everywhere: bool) -> None:
    def work(place: Place) -> list[float]:
        place.train(held(place), scope=scope)
        weight, values = next(place.module.parameters()), []
        for step in range(3):
            weight.requires_grad_(step != 1 or not (everywhere or place.index == 1))
            if weight.requires_grad:
                add_grad(weight, 1.0 + place.index + 2 * place.rank)
            place.opt.step()
            place.opt.zero_grad()
            values.append(weight.item())
        assert place.own.check()
        return values

    if everywhere:
        assert grid(2, 2, work) == [near([0.5, 0.5, 0.0])] * 4
        return
    found = grid_errors(2, 2, work)
    assert all(isinstance(error, ExchangeError) for error in found)
    assert all("'embed.weight'" in str(error) and "change of requires_grad" in str(error) for error in found)


def test_plans_that_differ_between_pipelines() -> None:
    def ties_differ(place: Place) -> None:
        names = NAMES if place.index == 0 else ("embed.weight", "other.weight")
        place.train({names[place.rank]: 1.0}, scope="pipeline", ties=(names,))

    def options_differ(place: Place) -> None:
        place.train(held(place), scope="global", lr=0.1 * (1 + place.index))

    def scopes_differ(place: Place) -> None:
        place.train(held(place), scope=SCOPES[place.index])

    def one_fails(place: Place) -> None:
        place.train(held(place), scope="global", ties=(NAMES,) if place.index == 0 else (("a", "b"),))

    def owner_differs(place: Place) -> None:
        place.train(held(place), scope="global", owner=place.index)

    for work, word in (
        (ties_differ, "other.weight"),
        (options_differ, "lr"),
        (scopes_differ, "global"),
        (one_fails, "no stage holds"),
        (owner_differs, "owner"),
    ):
        for error in grid_errors(2, 2, work):
            assert isinstance(error, TieError)
            assert word in str(error)


def test_describe_names_the_scope() -> None:
    def work(place: Place) -> tuple[str, Any, str]:
        place.train(held(place), scope="global")
        return place.own.describe(), place.own.plan.to_dict()["scope"], place.own.plan.digest

    found = grid(2, 2, work)
    assert [text.count("owns it") for text, _, _ in found] == [1, 1, 0, 0]
    assert all("scope global" in text and "of 2" in text for text, _, _ in found)
    assert {scope for _, scope, _ in found} == {"global"}
    assert len({digest for _, _, digest in found}) == 1


@pytest.mark.parametrize(
    ("scope", "method"),
    [
        ("global", "reduce_grad"),
        ("global", "spread_weight"),
        ("pipeline", "agree"),
        ("pipeline", "average"),
        ("global", "differences"),
    ],
)
@pytest.mark.parametrize("where", [(1, 0), (0, 0)])
def test_case_44_a_rank_that_fails_in_any_phase_is_named_by_all(
    scope: str, method: str, where: tuple[int, int]
) -> None:
    def work(place: Place) -> None:
        place.train(held(place), scope=scope)
        side = place.own.exchange.side

        def fail(*_: object, **__: object) -> None:
            raise OSError("the disk is on fire")

        if (place.index, place.rank) == where:
            setattr(side, method, fail)
        add_grad(next(place.module.parameters()), 1.0)
        place.opt.step()
        place.own.check()

    for error in grid_errors(2, 2, work):
        assert "the disk is on fire" in str(error)
        if not isinstance(error, OSError):
            assert f"rank {where[1]} failed first" in str(error)
            assert f"of pipeline {where[0]}" in str(error)
