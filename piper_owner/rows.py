"""The compact table of a replica that only looks rows up: this step's rows, and no copy.

The user's nn.Embedding stays, and so does everything that its class does around the lookup. Its
weight becomes a `RowsParameter`: `F.embedding` on it, inside the module's own forward, runs on the
compact table with ids and padding_idx mapped to its rows; anything else raises. Autograd's gradient
of the compact table is the gradient of those rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper_owner.cost import table_capacity
from piper_owner.errors import RowIndexError, RowsError, TieError
from piper_owner.streams import is_capturing

_LOG = logging.getLogger(__name__)

__all__ = ["RowsParameter", "RowsTable", "checked_ids"]

_INTEGERS: Final = frozenset(
    {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
)
_NONE: Final = 2**62  # no id: behind every real one in a sorted table, and exact as a float

_INERT: Final = frozenset(
    {
        "__deepcopy__", "__hash__", "__len__", "__reduce_ex__", "__repr__", "__set__", "data_ptr",
        "dim", "element_size", "get_device", "has_names", "ndimension", "nelement", "numel",
        "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size",
        "storage_offset", "stride", "type", "untyped_storage",
    }
)  # fmt: skip
"""What torch and torch.compile ask of a parameter without computing with its values."""
_GIVING_ALIASES: Final = frozenset(
    {"bfloat16", "cpu", "cuda", "detach", "double", "float", "half", "to", "view_as"}
)
"""What modules, state_dict and split backwards call for a tensor with the same values; that stays guarded."""
_COMPUTING_PROPERTIES: Final = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})


def checked_ids(ids: Sequence[Tensor], num_rows: int, what: str) -> Tensor:
    """The ids in all tensors of `ids`, int64, ascending, each once. Local.

    Raises RowIndexError (an IndexError) for an id that is not in 0 to num_rows - 1, or is no integer.
    """
    flat = []
    for index, tensor in enumerate(ids):
        if not isinstance(tensor, Tensor) or tensor.dtype not in _INTEGERS:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise RowIndexError(f"{what}: ids[{index}] is {kind}; ids are tensors of integers")
        flat.append(tensor.detach().reshape(-1).to(torch.int64))
    unique = torch.unique(torch.cat(flat)) if flat else torch.empty(0, dtype=torch.int64, device="cpu")
    if unique.numel():
        for wrong in (int(unique[0]), int(unique[-1])):
            if not 0 <= wrong < num_rows:
                raise RowIndexError(_outside(what, wrong, num_rows))
    return unique


def _outside(what: str, wrong: int, num_rows: int) -> str:
    return f"{what}: id {wrong} is outside the vocabulary of {num_rows} (0 to {num_rows - 1})"


class RowsParameter(nn.Parameter):
    """The weight of an embedding that keeps rows only; `table` is its RowsTable."""

    table: RowsTable

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever `func` returns
        kwargs = kwargs or {}
        if func is functional.embedding:
            return _embedding(*args, **kwargs)
        name = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None)
        read = getattr(owner, "__name__", "") if name == "__get__" else ""
        is_inner = name.startswith("is_") or (name.startswith("_") and not name.startswith("__"))
        if (read and read not in _COMPUTING_PROPERTIES) or is_inner or name in _INERT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _GIVING_ALIASES and isinstance(args[0], RowsParameter):
            with torch._C.DisableTorchFunctionSubclass():
                return _guarded(func(*args, **kwargs), args[0].table)
        found = [each for each in (*args, *kwargs.values()) if isinstance(each, RowsParameter)]
        where = found[0].table.what if found else "a tie"
        raise RowsError(
            f"{where}: {read or name} was called on a weight that keeps only the rows fetched for this step, "
            "not the table. It can be looked up by calling its nn.Embedding; to use all of it here, "
            "assign_owners with layout='dense', or with uses={name: 'dense'}"
        )


def _guarded(alias: Tensor, table: RowsTable) -> Tensor:
    """`alias`, for which the same is refused as for the weight of `table`."""
    if type(alias) is not Tensor:  # the weight itself, or a tensor of a compiler, which has no values
        return alias
    alias = alias.as_subclass(RowsParameter)
    alias.table = table
    return alias


def _embedding(
    ids: Tensor,
    weight: RowsParameter,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`torch.nn.functional.embedding` on the compact table."""
    table = weight.table
    if not table.is_open or max_norm is not None:
        raise RowsError(
            f"{table.what}: its rows are looked up outside the forward of its own nn.Embedding, or with a "
            "max_norm; call the module, or assign_owners with layout='dense'"
        )
    if padding_idx is not None:  # without a row torch would say that there is none for it
        padding_idx = table.padding_slot(padding_idx) if weight.shape[0] else None
    slots = torch.ops.piper_owner.slots_of(
        ids, table.known_ids, table.known_slots, table.missed, table.num_rows, table.what
    )
    if torch.is_grad_enabled():
        table.is_pending = True
    with torch._C.DisableTorchFunctionSubclass():
        return functional.embedding(slots, weight, padding_idx, None, norm_type, scale_grad_by_freq, sparse)


@torch.library.custom_op("piper_owner::slots_of", mutates_args=("missed",))
def _slots_of(
    ids: Tensor, known_ids: Tensor, known_slots: Tensor, missed: Tensor, num_rows: int, what: str
) -> Tensor:
    """The row of the compact table for each id. An operator of its own: torch.compile does not look inside.

    An unknown id raises on the CPU; elsewhere, to spare a host sync, it goes to `missed`, which is
    read when the step ends, and its row is the first. While a CUDA graph is captured it raises.
    """
    if is_capturing():
        raise RowsError(
            f"{what}: rows were looked up while a CUDA graph is captured, and the table that keeps them "
            "moves when it grows, which a replay would not know. Leave this stage out of the graph "
            "(torch.compile without mode='reduce-overhead'), or assign_owners with layout='dense'"
        )
    if not ids.numel():
        return torch.zeros(ids.shape, dtype=torch.int64, device=ids.device)
    wanted = ids.to(torch.int64).contiguous()
    if not known_ids.numel():
        raise RowsError(_not_fetched(what, None))
    places = torch.searchsorted(known_ids, wanted).clamp_(max=known_ids.numel() - 1)
    unknown = known_ids[places] != wanted
    if ids.device.type == "cpu":
        if bool(unknown.any()):
            wrong = int(wanted[unknown].reshape(-1)[0])
            if not 0 <= wrong < num_rows:
                raise RowIndexError(_outside(what, wrong, num_rows))
            raise RowsError(_not_fetched(what, wrong))
    else:
        missed.copy_(torch.maximum(missed, torch.where(unknown, wanted + 1, 0).max()))
    return torch.where(unknown, 0, known_slots[places])


@_slots_of.register_fake
def _(
    ids: Tensor, known_ids: Tensor, known_slots: Tensor, missed: Tensor, num_rows: int, what: str
) -> Tensor:
    return torch.empty(ids.shape, dtype=torch.int64, device=ids.device)


def _not_fetched(what: str, wrong: int | None) -> str:
    which = "no row was" if wrong is None else f"id {wrong} was not"
    return (
        f"{what}: {which} fetched for this step. Call opt.prefetch(ids) on every rank before the forward, "
        "with all ids of all microbatches (None on ranks that look nothing up), and again after each step"
    )


class RowsTable:
    """This step's rows of one tie, on a rank that only looks rows up.

    modules: the nn.Embeddings of this rank whose weight the tie is; each gets `parameter` as its
    weight. `ids` are those fetched, in the order in which rows and gradients travel, int64.
    """

    def __init__(
        self, modules: Sequence[nn.Embedding], full: nn.Parameter, *, what: str, device: torch.device
    ) -> None:
        self.what = what
        self.num_rows, *columns = full.shape
        self._modules = list(modules)
        self._columns = tuple(columns)
        self.is_open = False
        """Whether the forward of one of the modules runs."""
        self.is_pending = False
        """Whether a forward since the last step may still need its backward."""
        paddings = {m.padding_idx: None for m in modules if m.padding_idx is not None}
        self._padding_slots = {padding: slot for slot, padding in enumerate(paddings)}
        self._loading: set[str] = set()
        self._older: list[tuple[RowsParameter, int]] = []
        self.missed = torch.zeros((), dtype=torch.int64, device=device)
        self.ids = self.next_ids = torch.empty(0, dtype=torch.int64, device=device)
        self._slots = self.ids
        self._asked: tuple[Tensor, int] | None = None
        self._show(torch.empty(0, *columns, dtype=full.dtype, device=device), full)
        self.known_ids = self.known_slots = self.ids
        for module in modules:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)
            module.register_state_dict_post_hook(_leave_out)
            module.register_load_state_dict_pre_hook(self._drop)
            module.register_load_state_dict_post_hook(self._not_missing)

    # -- fetching; what it makes outlives an inference_mode around it

    @torch.inference_mode(False)
    def request(self, ids: Tensor, *, next_step: bool = False) -> tuple[Tensor, bool]:
        """What to ask the owner for, and whether it adds to what was fetched, or replaces it.

        ids: of `checked_ids`. They add to those fetched while a gradient or graph of this step is
        pending; those of the next step replace whatever was asked for it before.
        """
        ids = ids.to(self.ids.device)
        if next_step:
            self.next_ids = ids
            return ids, False
        adds = self.is_pending or self._has_grad()
        if adds:
            ids = ids[~torch.isin(ids, self.ids)]
        else:
            self.forget()
        self._place(ids)
        return ids, adds

    @torch.inference_mode(False)
    def take_next(self) -> None:
        """Begin the next step with the ids that were requested for it; their rows come now."""
        ids, self.next_ids = self.next_ids, self.next_ids[:0]
        self.forget()
        self._place(ids)

    @torch.inference_mode(False)
    def fill(self, chunks: Iterator[tuple[int, int, Tensor]]) -> None:
        """Store the rows of the last request, in its order; after that they can be looked up."""
        assert self._asked is not None
        ids, first = self._asked
        slots = self._slots[first:]
        table = self._rows
        for start, stop, rows in chunks:
            values = rows.to(table.device).view(stop - start, *self._columns)
            table.index_copy_(0, slots[start:stop], values)
        self._asked = None
        known = torch.cat((self.ids, ids))
        order = torch.argsort(known)
        spare = self._rows.shape[0] - known.numel()
        self.ids = known
        self.known_ids = functional.pad(known[order], (0, spare), value=_NONE)
        self.known_slots = functional.pad(self._slots[order], (0, spare))

    @property
    def num_asked(self) -> int:
        """How many rows the last request is for."""
        return 0 if self._asked is None else self._asked[0].numel()

    @torch.inference_mode(False)
    def forget(self) -> None:
        """Drop what was fetched and every gradient: the step is over, or its value is an old one."""
        self.drop_grads()
        self._older.clear()
        self._asked = None
        self.ids = self._slots = self.ids[:0]
        self.known_ids = torch.full_like(self.known_ids, _NONE)

    def rows(self) -> Tensor:
        """The fetched rows, in the order of `ids`."""
        return self._rows.index_select(0, self._slots)

    @property
    def parameters(self) -> list[RowsParameter]:
        """The compact table, and smaller ones that graphs of this step still need."""
        return [self.parameter, *(older for older, _ in self._older)]

    @property
    def bookkeeping(self) -> list[Tensor]:
        """The tensors that tell which row is where."""
        asked = () if self._asked is None else (self._asked[0],)
        return [self.ids, self.next_ids, self._slots, self.known_ids, self.known_slots, self.missed, *asked]

    # -- gradients

    def take_grad(self) -> Tensor | None:
        """The gradient of the fetched rows, (number of ids, ...), in the order of `ids`; then it is None."""
        self._check_missed()
        total: Tensor | None = None
        for parameter, count in (*self._older, (self.parameter, self.ids.numel())):
            grad, parameter.grad = parameter.grad, None
            if grad is None:
                continue
            grad = grad.to_dense() if grad.is_sparse else grad
            if total is None:
                total = grad.new_zeros(self.ids.numel(), *self._columns)
                total[:count] = grad.index_select(0, self._slots[:count])
            else:
                total[:count] += grad.index_select(0, self._slots[:count])
        return total

    def drop_grads(self) -> None:
        """Set all gradients to None: no backward is pending any more."""
        self.is_pending = False
        for parameter, _ in (*self._older, (self.parameter, 0)):
            parameter.grad = None

    def padding_slot(self, padding_idx: int) -> int:
        """The row that padding has, whatever was fetched, so that it is a constant for torch.compile."""
        padding_idx += self.num_rows if padding_idx < 0 else 0
        if padding_idx not in self._padding_slots:
            raise RowsError(
                f"{self.what}: padding_idx is {padding_idx}, and was one of {sorted(self._padding_slots)} in "
                "assign_owners; set it before"
            )
        return self._padding_slots[padding_idx]

    # -- inside

    @property
    def _rows(self) -> Tensor:
        """The compact table as a plain tensor; of its dtype and device now, which a module may change."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.parameter.detach()

    def _has_grad(self) -> bool:
        return any(p.grad is not None for p, _ in (*self._older, (self.parameter, 0)))

    def _place(self, ids: Tensor) -> None:
        """Give `ids` rows of the table, in a larger one if it takes that."""
        slots = torch.empty_like(ids)
        free = torch.ones_like(ids, dtype=torch.bool)
        for padding, slot in self._padding_slots.items():
            here = ids == padding
            slots[here] = slot
            free &= ~here
        before = self.ids.numel() - sum(bool((self.ids == p).any()) for p in self._padding_slots)
        first = len(self._padding_slots) + before
        num_free = int(free.sum())
        slots[free] = torch.arange(first, first + num_free, device=ids.device)
        self._resize(first + num_free, self.ids.numel() + ids.numel())
        self._asked = (ids, self.ids.numel())
        self._slots = torch.cat((self._slots, slots))

    def _resize(self, needed: int, num_ids: int) -> None:
        """Keep the capacity where it fits: a change may make torch.compile compile again."""
        capacity = self._rows.shape[0]
        wanted = table_capacity(needed, num_ids=num_ids, before=capacity)
        if capacity == wanted:
            return
        rows = self._rows.new_zeros(wanted, *self._columns)
        before = self.parameter
        keeps = self.ids.numel() > 0 or self.is_pending or self._has_grad()
        if keeps:
            rows[:capacity] = self._rows
        self._show(rows, before)
        if keeps:  # graphs of this step stay with the old table
            self._older.append((before, self.ids.numel()))
            self._move_grad(before)

    def _move_grad(self, before: RowsParameter) -> None:
        """Give the table the gradient of a smaller one, where a schedule that scales gradients finds it."""
        grad, before.grad = before.grad, None
        if grad is not None:
            moved = self._rows.new_zeros(self._rows.shape, dtype=grad.dtype)
            moved[: len(grad)] = grad.to_dense() if grad.is_sparse else grad
            self.parameter.grad = moved

    def _show(self, rows: Tensor, before: nn.Parameter) -> None:
        """Make `rows` the weight of the modules, with the hooks and attributes of that `before`."""
        self.parameter = RowsParameter(rows, requires_grad=before.requires_grad)
        self.parameter.__dict__.update(before.__dict__)
        self.parameter.table = self
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(before, name):
                setattr(self.parameter, name, hooks)
        for module in self._modules:
            module._parameters["weight"] = self.parameter

    def _check_missed(self) -> None:
        if self.missed.device.type != "cpu" and int(self.missed):
            wrong = int(self.missed) - 1
            self.missed.zero_()
            raise RowsError(_not_fetched(self.what, wrong))

    def _enter(self, module: nn.Module, args: object) -> None:
        self.is_open = True

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        self.is_open = False

    def _drop(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: object) -> None:
        """Take the whole table out of what is loaded: this rank does not keep it."""
        self._loading.add(f"{prefix}weight")
        value = state_dict.pop(f"{prefix}weight", None)
        if isinstance(value, RowsParameter):
            return  # torch.distributed.checkpoint puts the weight itself where a full state lacks it
        if value is not None and tuple(value.shape) != (self.num_rows, *self._columns):
            raise TieError(
                f"{self.what}: {prefix}weight to load has shape {tuple(value.shape)}, the table has "
                f"{(self.num_rows, *self._columns)}"
            )
        if value is not None:
            _LOG.warning(
                "%s: %sweight was left out of what is loaded: this rank keeps only the rows of a step. Load "
                "the value on the owner, then call Ownership.sync() on every rank",
                self.what,
                prefix,
            )

    def _not_missing(self, module: nn.Module, incompatible: Any) -> None:  # noqa: ANN401 - torch's own
        keys = incompatible.missing_keys
        keys[:] = [key for key in keys if key not in self._loading]

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{self.what}: an embedding that keeps rows only is served by another rank and cannot be copied "
            "or pickled; copy it before assign_owners, or save its stage's state_dict()"
        )


def _leave_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: object) -> None:
    """Keep this step's rows out of what is saved: the owner saves the table."""
    state_dict.pop(f"{prefix}weight", None)
