"""Ranks that train tied weights with an OwnerOptimizer in a loop of their own, as threads.

The usual fixture: one tied weight W = 1 on two ranks, SGD at 0.1, the owner's gradient 2, the
replica's 3. Right is 0.5 on both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore

from piper_owner.assignment import Ownership, assign_over
from piper_owner.executor.local import run_threads
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.transport import Fabric, GlooFabric

__all__ = ["NAMES", "TIE", "Rank", "Weights", "add_grad", "errors", "near", "process_group", "ranks"]

T = TypeVar("T")

NAMES: Final = ("embed.weight", "head.weight")
"""The names of the tied weight on the ranks 0 and 1."""

TIE: Final = (NAMES,)

TIMEOUT: Final = timedelta(seconds=10)


class Weights(nn.Module):
    """Parameters by full name, such as `Weights({"embed.weight": 1.0})`."""

    def __init__(self, values: Mapping[str, float | Tensor], *, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        for name, value in values.items():
            path, _, leaf = name.rpartition(".")
            if path not in dict(self.named_children()):
                self.add_module(path, nn.Module())
            tensor = value if isinstance(value, Tensor) else torch.full((1,), value)
            self.get_submodule(path).register_parameter(leaf, nn.Parameter(tensor.to(dtype).clone()))


def add_grad(parameter: nn.Parameter, grad: float | Tensor | None) -> None:
    """Run a backward that adds `grad` to the gradient; nothing for None."""
    if grad is not None:
        (parameter * grad).sum().backward()


class Rank:
    """One rank of the fixture, or of something near it."""

    def __init__(
        self,
        fabric: Fabric,
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        *,
        values: Mapping[str, float | Tensor] | None = None,
        local: float | None = None,
        dtype: torch.dtype = torch.float64,
        grads: Sequence[Any] = (2.0, 3.0),
        ties: Sequence[Sequence[str]] = TIE,
        assign: Mapping[str, Any] | None = None,
        params: Callable[[nn.Module], Any] | None = None,
        **options: Any,  # noqa: ANN401 - the options of any optimizer
    ) -> None:
        self.rank = fabric.rank
        if values is None:
            values = {NAMES[self.rank]: 1.0} if self.rank < len(NAMES) else {}
        if local is not None:
            values = {**values, "own.weight": local}
        self.module = Weights(values, dtype=dtype)
        self.grad = grads[self.rank] if self.rank < len(grads) else None
        self.own: Ownership = assign_over(fabric, self.module, ties, **(assign or {}))
        listed = self.module.parameters() if params is None else params(self.module)
        options = {"lr": 0.1, **options}
        self.opt = OwnerOptimizer(listed, kind, ownership=self.own, **options)

    @property
    def weight(self) -> nn.Parameter:
        """The tied weight on this rank."""
        return self.module.get_parameter(NAMES[self.rank])

    @property
    def local(self) -> nn.Parameter:
        """The weight of this rank alone."""
        return self.module.get_parameter("own.weight")

    def backward(self, scale: float = 1.0) -> None:
        """Add this rank's gradient."""
        if self.grad is not None:
            add_grad(self.weight, self.grad * scale)

    def step(self) -> None:
        """Backward, step, zero_grad."""
        self.backward()
        self.opt.step()
        self.opt.zero_grad()

    def value(self) -> float:
        """The weight, as a number, after a proof that the copies are equal."""
        assert self.own.check()
        return self.weight.item()


def near(value: Any, tolerance: float = 1e-12) -> Any:  # noqa: ANN401 - what pytest.approx takes and gives
    """Equal to `value` but for rounding."""
    return pytest.approx(value, abs=tolerance)


def ranks(num: int, work: Callable[[Fabric], T], *, timeout: timedelta = TIMEOUT) -> list[T]:
    """What `work` returns on every rank."""
    return run_threads(num, work, timeout=timeout)


def errors(num: int, work: Callable[[Fabric], object], *, timeout: float = 2.0) -> list[BaseException]:
    """The error of every rank; all of them must fail."""

    def guarded(fabric: Fabric) -> BaseException:
        try:
            work(fabric)
        except Exception as error:  # the test looks at it
            return error
        raise AssertionError(f"rank {fabric.rank} went on as if nothing had happened")

    return run_threads(num, guarded, timeout=timedelta(seconds=timeout))


@contextmanager
def process_group(fabric: Fabric) -> Iterator[None]:
    """torch.distributed as a user has it, over the ranks of the pool; warnings are errors."""
    assert isinstance(fabric, GlooFabric)
    # Numbered: the addresses of an earlier group of the same call still stand in the store.
    number = fabric._store.add(f"process groups of rank {fabric.rank}", 1)
    store = PrefixStore(f"user{number}", fabric._store)
    try:
        dist.init_process_group(
            "gloo", store=store, rank=fabric.rank, world_size=fabric.world_size, timeout=fabric.timeout
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
        dist.barrier()  # nobody takes its groups down while another still makes its own
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch numbers groups by a count that must agree among the ranks of the next call.
        dist.distributed_c10d._world.group_count = 0
