"""Ranks that are late, slow or dead, and many steps, in a training loop of one's own."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from owners import NAMES, TIE, Rank, Weights, add_grad, errors, near, ranks
from ranks import RankFailures
from tiny import LateFabric, one_torch_thread
from torch import Tensor, nn

from piper_owner.assignment import assign_over
from piper_owner.errors import ExchangeError
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.transport import Channel, Fabric, Group, Header, Phase, Work
from piper_owner.transport.wire import HEADER_BYTES

if TYPE_CHECKING:
    from ranks import RankPool


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


# -- late ranks


def test_weights_that_arrive_late_are_waited_for() -> None:
    """The next loss is that of one process, though the new weights take a second to arrive."""
    late = threading.Event()

    def work(fabric: Fabric) -> tuple[list[float], float]:
        rank = Rank(LateFabric(fabric, 1, late, 1.0))
        losses = []
        start = time.monotonic()
        for step in range(2):
            loss = (rank.weight * rank.grad).sum()  # type: ignore[operator]
            loss.backward()
            losses.append(loss.item())
            if step == 0 and fabric.rank == 1:
                late.set()  # what rank 1 receives first are the new weights
            rank.opt.step()
            rank.opt.zero_grad()
        return losses, time.monotonic() - start

    (first, _), (second, seconds) = ranks(2, work)
    assert seconds > 1.0
    assert [one + two for one, two in zip(first, second, strict=True)] == near([5.0, 2.5])


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("late", [1, 2])
def test_either_of_two_replicas_is_late(late: int, clip: bool) -> None:
    names = ("a.w", "b.w", "c.w")

    def work(fabric: Fabric) -> float:
        rank = Rank(fabric, values={names[fabric.rank]: 1.0}, ties=[names])
        parameter = rank.module.get_parameter(names[fabric.rank])
        for step in range(3):
            add_grad(parameter, 2.0 + fabric.rank)
            if step == 1 and fabric.rank == late:
                time.sleep(1.0)  # the fault itself
            if clip:
                rank.opt.clip_grad_norm_(1e9)
            rank.opt.step()
            rank.opt.zero_grad()
        assert rank.own.check()
        return parameter.item()

    assert ranks(3, work) == near([1 - 3 * 0.9] * 3)


class SlowHere(torch.optim.SGD):
    """SGD that takes a second on a rank whose local parameter is 2."""

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 - as in torch
        parameters = [p for group in self.param_groups for p in group["params"]]
        if any(p.numel() == 1 and p.item() == 2.0 for p in parameters):
            time.sleep(1.0)  # the fault itself
        return super().step(closure)


def writes_after_its_step(fabric: Fabric, kind: str) -> tuple[float, float, float]:
    """The owner writes its weights as soon as its step is over; the replica is slow to take them."""
    size = (3000, 100)
    module = Weights({NAMES[fabric.rank]: torch.ones(size), "own.weight": 1.0 + fabric.rank})
    own = assign_over(fabric, module, TIE, chunk_bytes=2**16)
    opt = OwnerOptimizer(
        module.parameters(), SlowHere if kind == "whole" else torch.optim.SGD, ownership=own, lr=0.1
    )
    if kind == "streamed" and fabric.rank == 1:
        inner_step = opt._step_inner

        def slow() -> None:
            time.sleep(1.0)  # the fault itself
            inner_step()

        opt._step_inner = slow  # type: ignore[method-assign]
    weight = module.get_parameter(NAMES[fabric.rank])
    seen = []
    for step in range(2):
        add_grad(weight, 2.0 + fabric.rank)
        opt.step()
        opt.zero_grad()
        seen.append(float(weight.detach().mean()))
        if fabric.rank == 0:
            with torch.no_grad():
                weight.fill_(9.0)
        assert step < 2
    own.close()
    return seen[0], seen[1], float(weight.detach().max() - weight.detach().min())


@pytest.mark.parametrize("kind", ["streamed", "whole"])
def test_weights_on_the_wire_are_those_of_their_step(rank_pool: RankPool, kind: str) -> None:
    """A second step starts from what was written over the first one's, on the owner."""
    owner, replica = rank_pool.run(2, writes_after_its_step, kind)
    assert replica == (near(0.5), near(8.5), 0.0)
    assert owner == (near(0.5), near(8.5), 0.0)


# -- ranks that die


@dataclass(frozen=True)
class Death:
    """Where a rank ends: as it announces `phase` in `step`, or in the all-reduce of a norm (None)."""

    rank: int
    phase: Phase | None
    step: int
    end: Callable[[], None]


class MortalChannel(Channel):
    """A channel whose rank may die as it sends a header."""

    def __init__(self, inner: Channel, death: Death) -> None:
        self.rank, self.peer, self.timeout = inner.rank, inner.peer, inner.timeout
        self._inner, self._death = inner, death

    def post_send(self, tensor: Tensor) -> Work:
        """Send, or die."""
        if tensor.dtype is torch.uint8 and tensor.numel() == HEADER_BYTES:
            header = Header.decode(tensor, "")
            if (header.phase, header.step) == (self._death.phase, self._death.step):
                self._death.end()
        return self._inner.post_send(tensor)

    def post_recv(self, tensor: Tensor) -> Work:
        """As it is."""
        return self._inner.post_recv(tensor)

    def close(self) -> None:
        """As it is."""
        self._inner.close()


class MortalGroup(Group):
    """A group whose rank may die in an all-reduce of two rows: that of a norm."""

    def __init__(self, inner: Group, death: Death) -> None:
        self.ranks, self._inner, self._death = inner.ranks, inner, death

    def all_reduce(self, tensor: Tensor) -> None:
        """Add, or die."""
        is_norm = tensor.dim() == 2
        if self._death.phase is None and is_norm and float(tensor[1].max()) == self._death.step:
            self._death.end()
        self._inner.all_reduce(tensor)

    def reduce(self, tensor: Tensor, root: int) -> None:
        """As it is."""
        self._inner.reduce(tensor, root)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """As it is."""
        self._inner.broadcast(tensor, root)

    def close(self) -> None:
        """As it is."""
        self._inner.close()


class MortalFabric(Fabric):
    """The fabric of a rank that may die."""

    def __init__(self, inner: Fabric, death: Death) -> None:
        self.rank, self.world_size, self.timeout = inner.rank, inner.world_size, inner.timeout
        self.board, self._inner, self._death = inner.board, inner, death

    def channel(self, peer: int, purpose: str) -> Channel:
        """This rank's end."""
        channel = self._inner.channel(peer, purpose)
        return MortalChannel(channel, self._death) if self.rank == self._death.rank else channel

    def group(self, ranks: tuple[int, ...], purpose: str) -> Group:
        """This rank's part."""
        group = self._inner.group(ranks, purpose)
        return MortalGroup(group, self._death) if self.rank == self._death.rank else group


def train_until(fabric: Fabric, death: Death) -> None:
    """Three steps with all that a loop does: the tie is frozen in the last."""
    rank = Rank(MortalFabric(fabric, death), torch.optim.Adam)
    for step in range(3):
        rank.weight.requires_grad_(step < 2)
        if step < 2:
            rank.backward()
        rank.opt.clip_grad_norm_(1.0)
        rank.opt.step()
        rank.opt.zero_grad()
        rank.own.check()


PHASES: list[tuple[int, Phase | None, int]] = [
    (0, Phase.VALUE, 0),
    (1, Phase.GRAD, 1),
    (0, Phase.WEIGHT, 1),
    (0, None, 1),
    (1, None, 1),
    (0, Phase.CHECK, 1),
    (1, Phase.CHECK, 1),
    (0, Phase.FREEZE, 2),
    (1, Phase.FREEZE, 2),
]


@pytest.mark.parametrize(("rank", "phase", "step"), PHASES)
def test_a_rank_that_fails_in_any_phase_is_named(rank: int, phase: Phase | None, step: int) -> None:
    def end() -> None:
        raise ArithmeticError("a fault of its own")

    found = errors(2, partial(train_until, death=Death(rank, phase, step, end)), timeout=5.0)
    assert isinstance(found[rank], ArithmeticError)
    other = found[1 - rank]
    assert isinstance(other, ExchangeError)
    if phase is None:
        assert f"the global norm of step {step}" in str(other)
    else:
        for part in (phase.value, repr(NAMES[0]), "rank 0", "rank 1", f"step {step}"):
            assert part in str(other)
    assert f"rank {rank} failed first" in str(other)
    assert "a fault of its own" in str(other)


def exit_now() -> None:
    """End the process as the kernel would."""
    os._exit(9)


@pytest.mark.parametrize(
    ("rank", "phase", "step"), [(1, Phase.GRAD, 1), (0, Phase.WEIGHT, 1), (1, None, 1), (1, Phase.FREEZE, 2)]
)
def test_a_process_that_dies_in_a_step_is_named(
    rank_pool: RankPool, rank: int, phase: Phase | None, step: int
) -> None:
    with pytest.raises(RankFailures) as caught:
        rank_pool.run(2, train_until, Death(rank, phase, step, exit_now))
    failures = caught.value.failures
    assert failures[rank].kind == "ProcessDied"
    assert failures[1 - rank].kind == "PeerLostError"
    text = failures[1 - rank].text
    parts = [f"step {step}", "rank 0"]  # what it had sent before may be lost with it
    if phase is not None:
        parts = [phase.value, repr(NAMES[0]), "rank 0", "rank 1", f"step {step}"]
    for part in parts:
        assert part in text


# -- many steps


def test_a_thousand_steps_leave_nothing_behind() -> None:
    """Steps of every kind in turn: clipped, checked, without a gradient, frozen."""
    together = threading.Barrier(2, timeout=20.0)

    def count(rank: Rank) -> tuple[int, ...]:
        lines = rank.own.exchange.lines.values()
        pending = sum(len(line._pending) for line in lines)
        together.wait()
        counts = (0, 0, 0)
        if rank.rank == 0:  # while the other one waits
            gc.collect()
            tensors = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
            counts = (threading.active_count(), len(os.listdir("/proc/self/fd")), tensors)
        together.wait()
        return (pending, *counts)

    def work(fabric: Fabric) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        rank = Rank(fabric, torch.optim.Adam, local=1.0)

        def step(number: int) -> None:
            rank.weight.requires_grad_(number % 5 != 0)
            if number % 5 > 1:
                rank.backward()
                add_grad(rank.local, 1.0)
            if number % 3 == 0:
                rank.opt.clip_grad_norm_(1.0)
            rank.opt.step()
            rank.opt.zero_grad()
            if number % 7 == 0:
                assert rank.own.check()

        for number in range(1, 21):
            step(number)
        before = count(rank)
        for number in range(21, 1001):
            step(number)
        after = count(rank)
        rank.own.close()
        return before, after, rank.own.step

    for before, after, steps in ranks(2, work):
        assert after == before
        assert steps == 1000


# -- what came from the meta device


def test_a_model_made_on_the_meta_device_and_emptied_is_tied_again() -> None:
    """Embedding and head are on one rank, and the head once more on another."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 2, dtype=torch.float64)
            self.head = nn.Linear(2, 5, bias=False, dtype=torch.float64)
            self.head.weight = self.embed.weight

    def work(fabric: Fabric) -> tuple[float, int]:
        with torch.device("meta"):
            module: nn.Module = (
                Both() if fabric.rank == 0 else nn.ModuleDict({"last": nn.Linear(2, 5, bias=False)})
            )
        module = module.double().to_empty(device="cpu")
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(1.0)
        own = assign_over(fabric, module, [("embed.weight", "head.weight", "last.weight")])
        opt = OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        if isinstance(module, Both):
            assert module.head.weight is module.embed.weight
            module.head(module.embed(torch.tensor([1]))).sum().backward()
        else:
            module["last"](torch.ones(1, 2, dtype=torch.float64)).sum().backward()  # type: ignore[index]
        opt.step()
        assert own.check()
        parameters = list(module.parameters())
        return float(parameters[0].detach().sum()), len(parameters)

    # Row 1 gets 5 from the lookup; every row 1 from each head.
    expected = near(10 - 0.1 * 2 * (5 + 5 + 5))
    assert ranks(2, work) == [(expected, 1), (expected, 1)]
