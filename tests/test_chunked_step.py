"""Stepping a parameter slice by slice leaves the bits that one whole step of torch's own leaves."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final, NoReturn

import pytest
import torch
from torch import nn

from piper_owner.errors import InputError
from piper_owner.stepping import ELEMENT_WISE, ParameterStepper, state_bytes
from piper_owner.transport.wire import row_ranges, rows_per_chunk

Options = dict[str, Any]

RATES: Final = (0.01, 0.003, 0.02, 0.0, 0.007)
# (shape, chunk bytes of float32): 1-D, odd rows, a ragged last chunk, 3-D, one chunk, many threads' worth
SHAPES: Final = (
    ((1000,), 1024),
    ((257, 33), 4096),
    ((130, 64), 1),
    ((70, 3, 5), 2048),
    ((40, 8), 10**9),
)
LARGE: Final = ((3000, 65), 64 * 65 * 4 * 10)

VARIANTS: Final[dict[type[torch.optim.Optimizer], list[Options]]] = {
    torch.optim.SGD: [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "foreach": True},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "fused": True},
        {"momentum": 0.5, "maximize": True, "foreach": True},
        {"momentum": 0.5, "maximize": True, "fused": True},
    ],
    torch.optim.Adam: [
        {},
        {"fused": True},
        {"foreach": True},
        {"amsgrad": True, "weight_decay": 0.1},
        {"amsgrad": True, "fused": True, "maximize": True},
        {"amsgrad": True, "foreach": True, "weight_decay": 0.1},
        {"betas": (0.5, 0.7), "eps": 1e-3, "maximize": True},
    ],
    torch.optim.AdamW: [
        {},
        {"fused": True},
        {"foreach": True, "amsgrad": True},
        {"fused": True, "amsgrad": True, "weight_decay": 0.3},
        {"maximize": True, "weight_decay": 0.0},
    ],
    torch.optim.NAdam: [
        {},
        {"foreach": True, "weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "momentum_decay": 0.01},
        {"maximize": True},
    ],
    torch.optim.RAdam: [
        {},
        {"foreach": True, "weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.5, 0.6)},
        {"maximize": True},
    ],
    torch.optim.Adamax: [{}, {"foreach": True, "weight_decay": 0.1}, {"maximize": True, "betas": (0.5, 0.7)}],
    torch.optim.RMSprop: [
        {},
        {"momentum": 0.9, "centered": True},
        {"momentum": 0.9, "centered": True, "weight_decay": 0.1, "foreach": True},
        {"alpha": 0.5, "maximize": True},
    ],
    torch.optim.Adagrad: [
        {},
        {"lr_decay": 0.1, "initial_accumulator_value": 0.5},
        {"lr_decay": 0.1, "weight_decay": 0.1, "foreach": True},
        {"initial_accumulator_value": 0.5, "maximize": True},
        {"fused": True, "lr_decay": 0.1},
    ],
}
CASES: Final = [(kind, options) for kind, variants in VARIANTS.items() for options in variants]


def name_of(case: object) -> str:
    if isinstance(case, type):
        return case.__name__
    assert isinstance(case, dict)
    return "-".join(f"{key}={value}" for key, value in case.items()) or "plain"


def randoms(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Twins:
    """The same parameter and optimizer twice: one steps whole, the other in slices."""

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        options: Options,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        value = randoms(shape, 1, dtype)
        self.shape, self.dtype = shape, dtype
        self.whole, self.sliced = nn.Parameter(value.clone()), nn.Parameter(value.clone())
        keywords: Any = {"lr": RATES[0], **options}
        self.plain = kind([self.whole], **keywords)
        self.optimizer = kind([self.sliced], **copy.deepcopy(keywords))
        self.stepper = ParameterStepper(self.optimizer, self.sliced)

    def set_rate(self, rate: float) -> None:
        for optimizer in (self.plain, self.optimizer):
            (group,) = optimizer.param_groups
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def step(self, number: int, chunk_bytes: int) -> None:
        """Step both with the same gradient."""
        grad = randoms(self.shape, 100 + number, self.dtype)
        grad.reshape(-1)[:: 7 + number] = 0.0
        self.whole.grad = grad.clone()
        self.plain.step()
        chunk_rows = rows_per_chunk(self.shape, self.dtype.itemsize, chunk_bytes)
        for start, stop in row_ranges(self.shape[0], chunk_rows):
            self.stepper.step_rows(start, stop, grad[start:stop].clone())
        self.stepper.finish()

    def assert_equal(self) -> None:
        assert bits(self.sliced) == bits(self.whole)
        mine, theirs = self.optimizer.state_dict(), self.plain.state_dict()
        assert mine["param_groups"] == theirs["param_groups"]
        assert list(mine["state"]) == list(theirs["state"])
        for index, state in theirs["state"].items():
            assert list(mine["state"][index]) == list(state)
            for key, value in state.items():
                other = mine["state"][index][key]
                assert type(other) is type(value)
                if isinstance(value, torch.Tensor):
                    assert (other.dtype, other.shape, other.stride()) == (
                        value.dtype,
                        value.shape,
                        value.stride(),
                    )
                    assert bits(other) == bits(value), key
                else:
                    assert other == value
        assert state_bytes(self.optimizer, self.sliced) == state_bytes(self.plain, self.whole)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_element_wise_class_is_tested() -> None:
    assert set(VARIANTS) == set(ELEMENT_WISE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("kind", "options"), CASES, ids=name_of)
def test_slices_leave_the_bits_of_the_whole_step(
    kind: type[torch.optim.Optimizer], options: Options, dtype: torch.dtype
) -> None:
    for shape, chunk_bytes in SHAPES:
        twins = Twins(kind, options, shape, dtype)
        assert twins.stepper.chunkable
        for number, rate in enumerate(RATES):
            twins.set_rate(rate)
            twins.step(number, chunk_bytes * dtype.itemsize // 4)
            twins.assert_equal()


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("kind", "options"), CASES, ids=name_of)
def test_slices_leave_the_bits_of_the_whole_step_on_any_number_of_threads(
    kind: type[torch.optim.Optimizer], options: Options, dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    shape, chunk_bytes = LARGE
    twins = Twins(kind, options, shape, dtype)
    for number in range(3):
        twins.step(number, chunk_bytes)
        twins.assert_equal()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam])
def test_a_rate_that_is_a_tensor(kind: type[torch.optim.Optimizer]) -> None:
    twins = Twins(kind, {"lr": torch.tensor(RATES[0])}, (257, 33))
    for number, rate in enumerate(RATES):
        twins.set_rate(rate)
        twins.step(number, 4096)
        twins.assert_equal()


@pytest.mark.parametrize(("kind", "options"), CASES, ids=name_of)
def test_slices_go_on_from_a_loaded_state(kind: type[torch.optim.Optimizer], options: Options) -> None:
    first = Twins(kind, options, (257, 33))
    for number in range(3):
        first.step(number, 10**9)
    twins = Twins(kind, options, (257, 33))
    with torch.no_grad():
        twins.whole.copy_(first.whole)
        twins.sliced.copy_(first.whole)
    twins.plain.load_state_dict(copy.deepcopy(first.plain.state_dict()))
    twins.optimizer.load_state_dict(copy.deepcopy(first.plain.state_dict()))
    twins.step(3, 4096)
    twins.step(4, 10**9)  # and whole and sliced steps may alternate
    twins.step(5, 4096)
    twins.assert_equal()


def test_hyper_parameters_are_those_of_the_group_at_that_moment() -> None:
    twins = Twins(torch.optim.AdamW, {}, (130, 64))
    twins.step(0, 1)
    for optimizer in (twins.plain, twins.optimizer):
        optimizer.param_groups[0].update(betas=(0.4, 0.6), eps=1e-2, weight_decay=0.5)
    twins.step(1, 1)
    twins.assert_equal()


def test_the_step_counter_stands_still_until_finish() -> None:
    twins = Twins(torch.optim.Adam, {}, (130, 64))
    twins.step(0, 1)
    grad = torch.ones(130, 64)
    twins.stepper.step_rows(0, 64, grad[:64])
    assert float(twins.optimizer.state[twins.sliced]["step"]) == 1.0
    twins.stepper.step_rows(64, 130, grad[64:])
    assert float(twins.optimizer.state[twins.sliced]["step"]) == 1.0
    twins.stepper.finish()
    assert float(twins.optimizer.state[twins.sliced]["step"]) == 2.0
    twins.stepper.finish()
    assert float(twins.optimizer.state[twins.sliced]["step"]) == 2.0


def test_a_sliced_step_keeps_its_state_tensors() -> None:
    twins = Twins(torch.optim.Adam, {}, (130, 64))
    twins.step(0, 1)
    before = {key: value.data_ptr() for key, value in twins.optimizer.state[twins.sliced].items()}
    twins.step(1, 1)
    after = {key: value.data_ptr() for key, value in twins.optimizer.state[twins.sliced].items()}
    del before["step"], after["step"]
    assert before == after
    assert list(twins.optimizer.state) == [twins.sliced]
    assert twins.optimizer.param_groups[0]["params"] == [twins.sliced]


class _Subclass(torch.optim.AdamW):
    pass


def _stepper(kind: type[torch.optim.Optimizer], value: torch.Tensor) -> ParameterStepper:
    parameter = nn.Parameter(value)
    keywords: Any = {"lr": 0.01}
    return ParameterStepper(kind([parameter], **keywords), parameter)


def test_what_slices_would_change_is_not_chunkable() -> None:
    table = torch.ones(8, 8)
    assert _stepper(torch.optim.AdamW, table).chunkable
    assert not _stepper(_Subclass, table).chunkable
    assert not _stepper(torch.optim.Adafactor, table).chunkable
    assert not _stepper(torch.optim.Rprop, table).chunkable
    assert not _stepper(torch.optim.AdamW, table.bfloat16()).chunkable
    assert not _stepper(torch.optim.AdamW, table.half()).chunkable
    # Rows of a transposed table are columns of its memory: slices would not end on vectors.
    assert not _stepper(torch.optim.AdamW, torch.ones(4, 8).t()).chunkable


@pytest.mark.parametrize("kind", [torch.optim.AdamW, _Subclass, torch.optim.Adafactor, torch.optim.Rprop])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_whole_step_leaves_every_other_parameter_alone(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    values = [randoms((6, 5), seed, dtype) for seed in range(3)]
    parameters = [nn.Parameter(value.clone()) for value in values]
    alone = nn.Parameter(values[1].clone())
    groups: Any = [
        {"params": parameters[:2], "weight_decay": 0.1, "lr": 0.02},
        {"params": parameters[2:], "lr": 0.5},
    ]
    if kind is torch.optim.Rprop:  # it knows no weight decay
        del groups[0]["weight_decay"]
    make: Any = kind
    optimizer = make(groups)
    keywords: Any = {"lr": 0.02} if kind is torch.optim.Rprop else {"lr": 0.02, "weight_decay": 0.1}
    plain = kind([alone], **keywords)
    stepper = ParameterStepper(optimizer, parameters[1])
    for number in range(3):
        grad = randoms((6, 5), 10 + number, dtype)
        for parameter in (*parameters, alone):
            parameter.grad = grad.clone()
        stepper.step_whole(grad)
        plain.step()
        assert bits(parameters[1]) == bits(alone)
        assert bits(parameters[0]) == bits(values[0])
        assert bits(parameters[2]) == bits(values[2])
        assert list(optimizer.state) == [parameters[1]]
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
    assert state_bytes(optimizer, parameters[1]) == state_bytes(plain, alone) > 0
    assert state_bytes(optimizer, parameters[0]) == 0


def test_a_whole_step_that_fails_puts_the_groups_back() -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizer = _Failing([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)
    groups = optimizer.param_groups
    with pytest.raises(ArithmeticError):
        ParameterStepper(optimizer, parameters[1]).step_whole(torch.ones(2))
    assert optimizer.param_groups is groups
    assert [group["params"] for group in groups] == [parameters[:1], parameters[1:]]


class _Failing(torch.optim.SGD):
    def step(self, closure: object = None) -> NoReturn:
        raise ArithmeticError


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
        (torch.optim.Adagrad, {"fused": True}),
    ],
    ids=name_of,
)
def test_a_transposed_table_steps_whole_whatever_the_layout_of_its_gradient(
    kind: type[torch.optim.Optimizer], options: Options
) -> None:
    keywords: Any = {"lr": 0.01, **options}
    value = randoms((33, 70), 1, torch.float32)
    plain, tied = nn.Parameter(value.clone().t()), nn.Parameter(value.clone().t())
    optimizers = kind([plain], **keywords), kind([tied], **keywords)
    stepper = ParameterStepper(optimizers[1], tied)
    assert not stepper.chunkable
    for number in range(3):
        grad = randoms((33, 70), 10 + number, torch.float32).t()
        plain.grad = grad.clone()
        assert plain.grad.stride() == plain.stride()
        optimizers[0].step()
        stepper.step_whole(grad.contiguous())
        assert bits(tied) == bits(plain)
    states = [optimizer.state_dict()["state"][0] for optimizer in optimizers]
    assert list(states[0]) == list(states[1])
    assert all(bits(states[0][key]) == bits(states[1][key]) for key in states[0])


def test_scalars_and_empty_tables_step() -> None:
    scalar = nn.Parameter(torch.tensor(1.0))
    stepper = ParameterStepper(torch.optim.SGD([scalar], lr=0.1), scalar)
    stepper.step_rows(0, 1, torch.tensor([5.0]))
    stepper.finish()
    assert float(scalar.detach()) == 0.5
    empty = _stepper(torch.optim.AdamW, torch.ones(0, 4))
    empty.step_rows(0, 0, torch.ones(0, 4))
    empty.finish()


@pytest.mark.parametrize("groups", [0, 2])
def test_a_parameter_is_in_exactly_one_group(groups: int) -> None:
    parameter, other = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([other], lr=0.1)
    for _ in range(groups):
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": [parameter]})
    with pytest.raises(InputError, match=rf"shape \(3, 2\) is in {groups} groups of its SGD; put it into"):
        ParameterStepper(optimizer, parameter)


def test_bytes_of_the_state() -> None:
    parameter = nn.Parameter(torch.ones(10, 4))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    assert state_bytes(optimizer, parameter) == 0
    parameter.grad = torch.ones(10, 4)
    optimizer.step()
    assert state_bytes(optimizer, parameter) == 2 * 160 + 4
    assert state_bytes(optimizer, nn.Parameter(torch.ones(1))) == 0
    assert list(optimizer.state) == [parameter]
