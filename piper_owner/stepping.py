"""Step one parameter of an ordinary torch optimizer, whole or in slices of its rows.

An element-wise optimizer reads and writes each element of the weight, the gradient and the state
on its own. So it can step a parameter in slices: a second optimizer of the same class is given
row-slice views of the three, with the hyper-parameters that the first has at that moment, and the
result is bit for bit that of one whole step. This is what lets the tied exchange stream.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import nn

from piper_owner.errors import ConfigError, InputError
from piper_owner.sharding import is_sharded, like, local_of
from piper_owner.transport.wire import ALIGNMENT

__all__ = [
    "ELEMENT_WISE",
    "MASTER",
    "Masters",
    "ParameterStepper",
    "TruthyState",
    "check_state_fits",
    "over_master",
    "state_bytes",
    "tensor_bytes",
    "unhooked_step",
]

MASTER: Final = "master"
"""The key of a parameter's master weights in its optimizer state."""

ELEMENT_WISE: Final[tuple[type[torch.optim.Optimizer], ...]] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
)
"""Classes whose chunked step is tested to be bitwise equal to the whole one. A subclass is not
among them: it may do anything."""

_SHAPED: Final = (torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop)
"""Further classes whose state has the parameter's shape, or none."""


def state_bytes(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    """Bytes of all state tensors that this rank keeps for `parameter`; 0 before its first step."""
    state = optimizer.state.get(parameter, {})
    return sum(tensor_bytes(local_of(value)) for value in state.values() if isinstance(value, torch.Tensor))


def tensor_bytes(value: torch.Tensor | None) -> int:
    """Bytes of a tensor, dense or sparse (its indices and values); 0 for None."""
    if value is None:
        return 0
    # Momentum over sparse gradients is sparse, too; torch counts no bytes of either.
    return value._indices().nbytes + value._values().nbytes if value.is_sparse else value.nbytes


def check_state_fits(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Raise ConfigError if `state_dict` has other groups, or state of another shape. Local; loads nothing.

    Shapes are compared for classes that are known to keep each state in that of its parameter, and for
    masters. An optimizer that loads in a way of its own is left to itself.
    """
    is_own_way = type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
    if is_own_way or optimizer._optimizer_load_state_dict_pre_hooks:
        return
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ConfigError(f"load_state_dict: no {missing} in what is to be loaded; it is no state_dict()")
    saved, here = state_dict["param_groups"], optimizer.param_groups
    lengths = [[len(group["params"]) for group in groups] for groups in (saved, here)]
    if lengths[0] != lengths[1]:
        raise ConfigError(
            f"load_state_dict: the saved groups have {lengths[0]} parameters, and those of this rank "
            f"{lengths[1]}; load what state_dict() gave on a rank that steps the same parameters"
        )
    parameters = [p for group in here for p in group["params"]]
    saved_ids = [i for group in saved for i in group["params"]]
    is_known = type(optimizer) in (*ELEMENT_WISE, *_SHAPED)
    for index, (saved_id, parameter) in enumerate(zip(saved_ids, parameters, strict=True)):
        for key, value in state_dict["state"].get(saved_id, {}).items():
            if not isinstance(value, torch.Tensor) or not value.dim() or key == "step":
                continue
            if not is_known and key != MASTER:
                continue
            if value.shape != parameter.shape and is_sharded(value) == is_sharded(parameter):
                raise ConfigError(
                    f"load_state_dict: {key!r} of parameter {index} has shape {tuple(value.shape)}, and that "
                    f"parameter has {tuple(parameter.shape)} on this rank; load what state_dict() gave on a "
                    "rank that steps the same parameters"
                )


@contextmanager
def over_master(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, master: nn.Parameter | None
) -> Iterator[nn.Parameter]:
    """Let `optimizer` find the state of `parameter` under `master` for a while, and copy the result.

    Yields what to step: `master`, or `parameter` itself when that is None. Afterwards the state is
    the parameter's again, with the master under MASTER, and the parameter is the master's value in
    its own dtype. The caller puts the gradient on what is yielded, and that into a group.
    """
    if master is None:
        yield parameter
        return
    state = optimizer.state
    mine = state.pop(parameter, {})
    mine.pop(MASTER, None)
    if mine:  # an optimizer takes an entry, even an empty one, for a state that it has made
        state[master] = mine
    try:
        yield master
    finally:
        mine = state.pop(master, {})
        if mine or master.grad is not None:
            state[parameter] = {**mine, MASTER: master.detach()}
        master.grad = None
    with torch.no_grad():
        parameter.copy_(master)


class TruthyState(defaultdict[torch.Tensor, Any]):
    """The state of a rank that has nothing to step: empty, and yet true.

    torch.distributed.checkpoint takes an optimizer without state for one that has never stepped,
    and steps it to make its state, which on one rank alone would wait for the others.
    """

    def __bool__(self) -> bool:
        return True


class Masters:
    """Master weights in `dtype` of every narrower parameter of an optimizer; none if it is None.

    A master is stepped in its parameter's place, and the parameter becomes its value.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self._of: dict[nn.Parameter, nn.Parameter] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def get(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """The master of `parameter`, if it has one."""
        return self._of.get(parameter)

    @property
    def tensors(self) -> list[nn.Parameter]:
        """All masters."""
        return list(self._of.values())

    def make(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Make the masters that the parameters of `groups` lack, of the parameters' value."""
        if self.dtype is None:
            return
        for parameter in (p for group in groups for p in group["params"]):
            narrower = parameter.is_floating_point() and self.dtype.itemsize > parameter.dtype.itemsize
            if narrower and parameter not in self._of:
                self._of[parameter] = nn.Parameter(parameter.detach().to(self.dtype))

    @torch.no_grad()
    def refill(self, only: nn.Parameter | None = None) -> None:
        """Give every master, or that of `only`, its parameter's value."""
        for parameter, master in self._of.items():
            if only is None or only is parameter:
                master.copy_(parameter)

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        """After `optimizer` loaded `state_dict`, take masters and their state from it, bit for bit.

        torch casts loaded state to the parameter's dtype. Where no masters of this dtype were saved,
        floating state takes the masters' dtype, as torch would give it. A parameter without a saved
        master has its own value as its master.
        """
        if not self._of:
            return
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for saved_id, parameter in zip(saved_ids, parameters, strict=True):
            master = self._of.get(parameter)
            if master is None:
                continue
            state = optimizer.state.get(parameter) or {}
            saved = state_dict["state"].get(saved_id, {})
            is_same_kind = MASTER in saved and saved[MASTER].dtype == master.dtype
            for key, value in saved.items():
                if not isinstance(value, torch.Tensor):
                    continue
                is_cast = not is_same_kind and value.is_floating_point() and key not in ("step", MASTER)
                dtype = master.dtype if is_cast else value.dtype
                if state[key].dtype != dtype:
                    state[key] = value.detach().clone().to(parameter.device, dtype)
            if MASTER in state:
                master.copy_(state[MASTER])
                parameter.copy_(master)
            else:
                master.copy_(parameter)
            if state:
                state[MASTER] = master.detach()

    def step(self, optimizer: torch.optim.Optimizer, grads: Mapping[int, torch.Tensor]) -> None:
        """Step `optimizer` with masters in the place of their parameters that have a gradient.

        `grads`, by the id of the parameter, go before the parameter's own.
        """
        with ExitStack() as stack:
            for group in optimizer.param_groups:
                originals = group["params"]
                replaced = []
                for parameter in originals:
                    master = self._of.get(parameter)
                    grad = grads.get(id(parameter), parameter.grad)
                    if master is not None and grad is not None:
                        replaced.append(stack.enter_context(over_master(optimizer, parameter, master)))
                        master.grad = grad.to(master.dtype)
                    else:
                        replaced.append(parameter)
                stack.callback(group.__setitem__, "params", originals)
                group["params"] = replaced
            unhooked_step(optimizer)


class ParameterStepper:
    """Steps `parameter` as `optimizer` would, through `optimizer`'s own state.

    With a `master`, of the same shape and a wider dtype, that is stepped in the parameter's place,
    and the parameter becomes its value in its own dtype.

    Slices of a step come in ascending order, without gaps, each once, and `finish` ends the
    step; until then the step counter in the optimizer's state stands at its old value.

    Raises InputError if the parameter is not in exactly one group of the optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameter: nn.Parameter,
        master: nn.Parameter | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._parameter = parameter
        self._master = master
        self._stepped_tensor = parameter if master is None else master
        self.is_stepped = False
        """Set when the whole optimizer, and so the parameter, was stepped already in this step."""
        self._slicer: torch.optim.Optimizer | None = None
        self._is_first = False
        self._stepped: dict[str, Any] = {}
        groups = [
            i
            for i, group in enumerate(optimizer.param_groups)
            if any(p is parameter for p in group["params"])
        ]
        if len(groups) != 1:
            raise InputError(
                f"a tied parameter of shape {tuple(parameter.shape)} is in {len(groups)} groups of its "
                f"{type(optimizer).__name__}; put it into exactly one"
            )
        self._place = (groups[0], 0)

    def _group(self) -> dict[str, Any] | None:
        """The parameter's group as it is now; None if it was taken out of all of them.

        Groups may be added, moved and refilled at any time, so nothing but identity tells.
        """
        groups, (index, place) = self._optimizer.param_groups, self._place
        if index < len(groups):
            params = groups[index]["params"]
            if place < len(params) and params[place] is self._parameter:
                return groups[index]
        for index, group in enumerate(groups):
            for place, parameter in enumerate(group["params"]):
                if parameter is self._parameter:
                    self._place = (index, place)
                    return group
        return None

    @property
    def chunkable(self) -> bool:
        """Whether the optimizer is of an element-wise class and steps contiguous float32 or float64.

        In bfloat16 and float16 torch's vector loops and their scalar tails round differently, so
        where a slice ends would show in the last bit. The rows of a transposed table are not
        slices of its memory, and fused optimizers read memory in its own order. A DTensor, whose rows
        lie on several ranks, is stepped whole.
        """
        fits = self.dtype in (torch.float32, torch.float64) and self._stepped_tensor.is_contiguous()
        fits = fits and not is_sharded(self._stepped_tensor)
        return not self.is_stepped and fits and type(self._optimizer) in ELEMENT_WISE

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it steps and takes gradients: the master's, or else the parameter's."""
        return self._stepped_tensor.dtype

    def step_whole(self, grad: torch.Tensor) -> None:
        """Step the whole parameter with `grad`, leaving every other parameter alone.

        The gradient of a DTensor is one, or its local part. A parameter that is in no group any more
        is not stepped, as in torch; nor are its rows.
        """
        group = self._group()
        if self.is_stepped or group is None:
            return
        everything = self._optimizer.param_groups
        with over_master(self._optimizer, self._parameter, self._master) as stepped:
            stepped.grad = _laid_out_like(stepped, like(stepped, grad))
            self._optimizer.param_groups = [{**group, "params": [stepped]}]
            try:
                unhooked_step(self._optimizer)
            finally:
                self._optimizer.param_groups = everything

    def step_rows(self, start: int, stop: int, grad: torch.Tensor) -> None:
        """Step rows `start` to `stop` with `grad`, which has their shape and is not kept."""
        parameter, group = self._parameter, self._group()
        if group is None:
            return
        if not parameter.dim() or (start == 0 and stop == parameter.shape[0]):
            self.step_whole(grad.view_as(parameter))
            return
        rows = nn.Parameter(self._stepped_tensor.detach()[start:stop], requires_grad=True)
        rows.grad = grad
        slicer = self._slicer = self._slicer or _same_class(self._optimizer, rows)
        slicer.param_groups = [{**group, "params": [rows]}]
        slicer.state.clear()
        if start == 0:
            state = self._optimizer.state.get(parameter, {})
            self._stepped = {key: value for key, value in state.items() if key != MASTER}
            self._is_first = not self._stepped
        if not self._is_first:
            whole = {k: v for k, v in self._optimizer.state[parameter].items() if k != MASTER}
            slicer.state[rows] = {key: self._slice(value, start, stop) for key, value in whole.items()}
        unhooked_step(slicer)
        self._keep(slicer.state[rows], start, stop)
        slicer.state.clear()
        if self._master is not None:
            with torch.no_grad():
                parameter[start:stop].copy_(rows)

    def preview_rows(self, ids: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """What the rows `ids` (int64) become when stepped with `grad`, in the parameter's dtype.

        Nothing is stepped: `step_rows` does that, with the same result but for the last bit of the few
        elements that do not fill a vector register.
        """
        group = self._group()
        if group is None:
            return self._parameter.detach().index_select(0, ids)
        pad = -len(ids) % ALIGNMENT  # so that the elements asked for fill the registers
        chosen = torch.cat((ids, ids.new_zeros(pad)))
        rows = nn.Parameter(self._stepped_tensor.detach().index_select(0, chosen))
        rows.grad = torch.cat((grad, grad.new_zeros(pad, *grad.shape[1:])))
        slicer = self._slicer = self._slicer or _same_class(self._optimizer, rows)
        slicer.param_groups = [{**group, "params": [rows]}]
        slicer.state.clear()
        state = self._optimizer.state.get(self._parameter, {})
        whole = {key: value for key, value in state.items() if key != MASTER}
        if whole:
            slicer.state[rows] = {
                key: value.index_select(0, chosen)
                if self._is_per_row(value, self._parameter.shape)
                else self._slice(value, 0, 0)
                for key, value in whole.items()
            }
        unhooked_step(slicer)
        slicer.state.clear()
        return rows.detach()[: len(ids)].to(self._parameter.dtype)

    def finish(self) -> None:
        """Make the state that is not per row, such as the step counter, that of the new step."""
        stepped, self._stepped = self._stepped, {}
        if self.is_stepped:
            self.is_stepped = False
            return
        if self._group() is None:
            return
        if self._master is not None:
            stepped[MASTER] = self._master.detach()
        if stepped:
            self._optimizer.state[self._parameter].update(stepped)

    def _is_per_row(self, value: object, shape: torch.Size) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shape

    def _slice(self, value: Any, start: int, stop: int) -> Any:  # noqa: ANN401 - optimizer state holds anything
        if self._is_per_row(value, self._parameter.shape):
            return value[start:stop]
        return value.clone() if isinstance(value, torch.Tensor) else value

    def _keep(self, stepped: dict[str, Any], start: int, stop: int) -> None:
        """Put what the slice's step left into the optimizer's own state."""
        parameter = self._parameter
        shape = torch.Size((stop - start, *parameter.shape[1:]))
        for key, value in stepped.items():
            if not self._is_per_row(value, shape):
                self._stepped[key] = value
                continue
            whole = self._stepped.get(key)
            if whole is None:  # the first step makes the state: grow it from the slices'
                whole = self._stepped[key] = torch.empty(
                    parameter.shape, dtype=value.dtype, device=value.device
                )
            rows = whole[start:stop]
            if rows.data_ptr() != value.data_ptr():
                rows.copy_(value)


def _laid_out_like(parameter: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
    """`grad` in the memory layout of `parameter`, as autograd leaves it and fused optimizers need it."""
    if grad.stride() == parameter.stride():
        return grad
    return torch.empty_like(parameter, requires_grad=False).copy_(grad)


def unhooked_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` without the step hooks that torch wraps around it."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)


def _same_class(optimizer: torch.optim.Optimizer, rows: nn.Parameter) -> torch.optim.Optimizer:
    """A second optimizer of the same class; its groups and state are replaced before each use."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    return type(optimizer)([rows], **options)
