"""Bytes of one rank by what they are for: measured on what is there, and predicted from shapes and a plan.

    use = po.memory.measure(module, opt)           # after a step, or anywhere in it
    plan = po.memory.predict(module, own.plan, rank, optimizer="adamw")

Both work in any program with an OwnerOptimizer, are local, and change nothing.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from piper_owner.assignment import Ownership
from piper_owner.errors import ConfigError
from piper_owner.exchange import Exchange
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.ownership import OwnershipPlan
from piper_owner.planning.config import DTYPE_BYTES, Method, Optimizer, PlanConfig, Transfer
from piper_owner.planning.memory import RankMemory, stepped_memory, tie_memory
from piper_owner.sharding import is_sharded, local_of
from piper_owner.stages import NameMap, Stage, full_name, listed_stages
from piper_owner.stepping import MASTER
from piper_owner.tied import TiedParameter

__all__ = [
    "KINDS",
    "MemoryUse",
    "ProcessMemory",
    "TensorTracker",
    "kept_tensors",
    "measure",
    "predict",
    "process_memory",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of one rank, by kind.

    weights: parameters, trained or not. gradients: theirs, also on their way to an owner, or as a wide sum.
    masters: wide copies that are stepped. optimizer: the other state of optimizers. rows: compact tables of
    replicas that keep no copy. staging: what the tied sync holds beside them. other: buffers of modules.
    """

    weights: int = 0
    gradients: int = 0
    masters: int = 0
    optimizer: int = 0
    rows: int = 0
    staging: int = 0
    other: int = 0

    def __add__(self, more: MemoryUse) -> MemoryUse:
        return MemoryUse(**{kind: getattr(self, kind) + getattr(more, kind) for kind in KINDS})

    def __or__(self, more: MemoryUse) -> MemoryUse:
        """Of each kind the larger."""
        return MemoryUse(**{kind: max(getattr(self, kind), getattr(more, kind)) for kind in KINDS})

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(getattr(self, kind) for kind in KINDS)

    def to_dict(self) -> dict[str, int]:
        """A JSON-ready dict of the kinds, and their `total`."""
        return {**asdict(self), "total": self.total}


KINDS: Final = tuple(field.name for field in fields(MemoryUse))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Bytes of this process: its resident set, and what torch's allocator has of the current CUDA device.

    `peak` is the most that was allocated there since `torch.cuda.reset_peak_memory_stats`. None: not known
    here, or no CUDA in use.
    """

    resident: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None

    def to_dict(self) -> dict[str, int | None]:
        """A JSON-ready dict."""
        return asdict(self)


def process_memory() -> ProcessMemory:
    """What this process has now. Local."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        resident = pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):  # no Linux
        resident = None
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return ProcessMemory(resident=resident)
    return ProcessMemory(
        resident=resident,
        allocated=torch.cuda.memory_allocated(),
        reserved=torch.cuda.memory_reserved(),
        peak=torch.cuda.max_memory_allocated(),
    )


# -- measured


def measure(
    stages: Stage | Iterable[Stage],
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    *,
    ownership: Ownership | Exchange | None = None,
    other: Iterable[Tensor] = (),
) -> MemoryUse:
    """The bytes that this rank keeps now, by kind. Local.

    stages: this rank's modules or PipelineStages. optimizer: what steps them, OwnerOptimizers or others.
    ownership: of ties that no OwnerOptimizer among them lists. other: further tensors to count as `other`.

    Memory is that of storages: one that several tensors share counts once, whole, under the first kind of
    rows, weights, masters, optimizer, gradients, staging, other that has it. Of a DTensor it is this rank's
    part. A tensor on the meta device has none.
    """
    seen: set[int] = set()
    sizes: Counter[str] = Counter()
    for kind, tensor in kept_tensors(stages, optimizer, ownership=ownership, other=other):
        for key, size in _storages(tensor):
            if key not in seen:
                seen.add(key)
                sizes[kind] += size
    return MemoryUse(**sizes)


def kept_tensors(
    stages: Stage | Iterable[Stage],
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    *,
    ownership: Ownership | Exchange | None = None,
    other: Iterable[Tensor] = (),
) -> Iterator[tuple[str, Tensor]]:
    """(kind, tensor) of everything that `measure` counts, in the order in which kinds claim storages."""
    modules = [
        s if isinstance(s, nn.Module) else s.submod
        for s in listed_stages(stages, getattr(ownership, "rank", 0))
    ]
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    exchanges = {id(each): each for each in _exchanges(optimizers, ownership)}.values()
    ties = [tie for exchange in exchanges for tie in exchange.tied.values()]
    tables = [tie.rows for tie in ties if tie.rows is not None]
    groups = [
        parameter for each in optimizers for group in each.param_groups for parameter in group["params"]
    ]
    shown = [parameter for module in modules for parameter in module.parameters()]
    compact = [parameter for table in tables for parameter in table.parameters]
    parameters = [*compact, *shown, *(tie.parameter for tie in ties), *groups]
    masters = [each._masters for each in optimizers if isinstance(each, OwnerOptimizer)]

    yield from (("rows", parameter) for parameter in compact)
    yield from (("weights", parameter) for parameter in parameters)
    yield from (("masters", master) for each in masters for master in each.tensors)
    for each in optimizers:
        yield from _state_tensors(each.state)
    grads = (*(parameter.grad for parameter in parameters), *(tie.wide_grad for tie in ties))
    yield from (("gradients", grad) for grad in grads if grad is not None)
    yield from (("gradients", m.grad) for each in masters for m in each.tensors if m.grad is not None)
    for exchange in exchanges:
        yield from _held(exchange)
    yield from (("other", buffer) for module in modules for buffer in module.buffers())
    yield from (("other", tensor) for tensor in other)


def _exchanges(
    optimizers: Iterable[torch.optim.Optimizer], ownership: Ownership | Exchange | None
) -> Iterator[Exchange]:
    given = [each.ownership for each in optimizers if isinstance(each, OwnerOptimizer)]
    for each in (*given, *([] if ownership is None else [ownership])):
        yield each.exchange if isinstance(each, Ownership) else each


def _state_tensors(state: Mapping[Tensor, Any]) -> Iterator[tuple[str, Tensor]]:
    for kept in state.values():
        for name, value in kept.items() if isinstance(kept, Mapping) else ():
            kind = "masters" if name == MASTER else "optimizer"
            yield from ((kind, leaf) for leaf in tree_iter(value) if isinstance(leaf, Tensor))


def _held(exchange: Exchange) -> Iterator[tuple[str, Tensor]]:
    """What the sync holds: gradients on their way, buffers, other messages, ids and whose they are."""
    for line in (*exchange.lines.values(), *exchange.fetching.lines.values()):
        for kind, tensor in line.held:
            yield "gradients" if kind == "grads" else "staging", tensor
    for tie in exchange.tied.values():
        yield from (("staging", ids) for ids in _ids_of(tie))


def _ids_of(tie: TiedParameter) -> Iterator[Tensor]:
    yield from (*tie.served.values(), *tie.asked_next.values(), *tie.pushed.values())
    yield from (ids for ids, _ in tie.asked.values())
    if tie.rows is not None:
        yield from tie.rows.bookkeeping


def _storages(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """(identity, bytes) of each storage that `tensor` lies in."""
    for storage in _storages_of(tensor):
        yield storage._cdata, storage.nbytes()


def _storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    # Subclasses of ours refuse to be read as if they were the whole table.
    with torch._C.DisableTorchFunctionSubclass():
        local = local_of(tensor) if is_sharded(tensor) else tensor
        is_sparse = local.layout is torch.sparse_coo
        for part in (local._indices(), local._values()) if is_sparse else (local,):
            if part.device.type != "meta" and part.layout is torch.strided:
                yield part.untyped_storage()


class TensorTracker(TorchDispatchMode):
    """Bytes of all tensors that torch's operators made while it was entered, and that are alive.

        with TensorTracker(tensor for _, tensor in po.memory.kept_tensors(module, opt)) as tracker:
            train_step()
        print(tracker.peak)

    known: tensors that were there before, and count too. It sees operators of the thread that entered it,
    and the backwards that this starts; what a kernel allocates inside it does not see. `live` are the bytes
    now, `peak` the most at one time. Local.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lock = RLock()  # a tensor may end in any thread, and in the midst of this one's work
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self.live = self.peak = 0
        for tensor in known:
            self.watch(tensor)

    def watch(self, tensor: Tensor) -> None:
        """Count `tensor`, until its memory ends."""
        for storage in _storages_of(tensor):
            key = storage._cdata
            with self._lock:
                if key in self._alive:
                    continue
                size = storage.nbytes()
                self._alive[key] = (size, weakref.ref(storage, partial(self._ended, key)))
                self.live += size
                self.peak = max(self.peak, self.live)

    def _ended(self, key: int, _: object) -> None:
        with self._lock:
            size, _ = self._alive.pop(key, (0, None))
            self.live -= size

    def reset_peak(self) -> None:
        """Let `peak` begin again, from what is alive now."""
        self.peak = self.live

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever `func` returns
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                self.watch(leaf)
        return result


# -- predicted


def predict(
    stages: Stage | Iterable[Stage],
    plan: OwnershipPlan,
    rank: int,
    *,
    optimizer: str = "adamw",
    master_dtype: torch.dtype | None = None,
    method: str | None = None,
    num_rows: int = 0,
    table_rows: int | None = None,
    chunk_bytes: int = 4 * 2**20,
    names: NameMap | None = None,
) -> MemoryUse:
    """What `rank` will keep in a step, by kind, when every parameter has its gradient and state. Pure.

    stages: modules of which names, shapes, dtypes, requires_grad and buffers are read, never a value: they
        may be on the meta device. names: as in `assign_owners`.
    plan: who owns and who holds, as `Ownership.plan` or `plan_ownership` give it.
    optimizer: adamw, adam, sgd (with momentum) or adafactor. master_dtype: as in OwnerOptimizer.
    method: "naive" or "all-reduce" for copies that each stage steps itself; None: as the plan says.
    num_rows: different rows that a replica without a copy looks up in the step; table_rows: rows of its
        compact table, where it was larger before.

    Weights, gradients, masters, optimizer, rows and other are those of a run to the byte. Staging is about
    what the sync holds between its messages; an all-reduce holds nothing then. Raises ConfigError for an
    optimizer or dtype that is not known.
    """
    config = _plan_config(optimizer, master_dtype, num_rows, chunk_bytes)
    modules = [s if isinstance(s, nn.Module) else s.submod for s in listed_stages(stages, rank)]
    copies = None if method is None else Method(method)
    tie_of = {name: tie for tie in plan.ties for name in tie.tie.names}
    found = MemoryUse()
    done: set[object] = set()
    for number, module in enumerate(modules):
        for bare, parameter in module.named_parameters(remove_duplicate=copies is not None):
            tie = tie_of.get(full_name(bare, names))
            # Of one that is no tie only identity tells whether it is in two places.
            key: object = tie.name if tie is not None and copies is None else (id(parameter), number)
            key = id(parameter) if tie is None else key
            if key in done:
                continue
            done.add(key)
            mine = replace(config, dtype=_dtype_name(parameter.dtype), master_dtype=config.master_dtype)
            shape = tuple(parameter.shape)
            if not parameter.requires_grad:
                found += MemoryUse(weights=parameter.numel() * parameter.dtype.itemsize)
            elif tie is None or copies is not None:
                found += _as_use(stepped_memory((shape,), mine))
            else:
                found += _of_tie(tie_memory(tie, rank, mine), tie.shape, mine, table_rows)
        found += MemoryUse(other=sum(buffer.nbytes for buffer in module.buffers()))
    return found


def _of_tie(
    memory: RankMemory, shape: tuple[int, ...], config: PlanConfig, table_rows: int | None
) -> MemoryUse:
    use = _as_use(memory)
    if not use.rows or table_rows is None:
        return use
    columns = torch.Size(shape[1:]).numel()
    table = table_rows * columns * config.itemsize
    return replace(use, rows=table, gradients=table)


def _as_use(memory: RankMemory) -> MemoryUse:
    return MemoryUse(**{kind: getattr(memory, kind) for kind in KINDS if kind != "other"})


def _plan_config(
    optimizer: str, master_dtype: torch.dtype | None, num_rows: int, chunk_bytes: int
) -> PlanConfig:
    known = [each.value for each in Optimizer]
    if optimizer not in known:
        raise ConfigError(
            f"optimizer={optimizer!r}: its state is not known; choose one of {', '.join(known)}"
        )
    return PlanConfig(
        optimizer=Optimizer(optimizer),
        dtype="float16",  # narrower than any master: each parameter puts its own in
        master_dtype=None if master_dtype is None else _dtype_name(master_dtype),
        num_rows=num_rows,
        chunk_bytes=chunk_bytes,
        transfer=Transfer.STREAMED,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ConfigError(f"dtype {name}: its memory is not known; choose one of {', '.join(DTYPE_BYTES)}")
    return name
