"""Streams of the CPU that check the order of work, so that code for a device can be tested without one.

Everything runs at once, in the order of the program. What is checked is whether a device would
have had to run it in that order: every operation of torch on this thread counts as work on the
current stream, and each byte that it reads or writes must have been left by work that came before it
by events. The same holds for what the host does with memory that a stream fills or empties.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from piper_owner.streams.base import Event, Stream, Streams

__all__ = ["CheckedStreams", "StreamOrderError"]

_DEFAULT: Final = "default stream"
_WAITING: Final = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "_unique2", "masked_select")
"""Operations after which the host knows a value: on a device it waits for it."""

Clock = dict[str, int]
"""By agent (a stream, or a thread of the host), how much of its work is known to be done."""


class StreamOrderError(AssertionError):
    """Work on a stream, or of the host, uses memory too early: a fault of this package."""


@dataclass(frozen=True, slots=True)
class _Access:
    """Bytes `start` to `stop` of a storage, as `agent` has used them in its work number `tick`."""

    agent: str
    tick: int
    start: int
    stop: int
    what: str


@dataclass(slots=True)
class _Memory:
    """What is known of one storage."""

    made_on: str = _DEFAULT
    is_host: bool = False
    known_to: set[str] = field(default_factory=set)
    name: str = ""
    writes: list[_Access] = field(default_factory=list)
    reads: list[_Access] = field(default_factory=list)


class _CheckedEvent(Event):
    def __init__(self, streams: CheckedStreams, clock: Clock) -> None:
        self.clock = clock
        self._streams = streams

    def synchronize(self, timeout: timedelta) -> None:
        self._streams.host_waits(self.clock)


class _CheckedStream(Stream):
    def __init__(self, streams: CheckedStreams, name: str) -> None:
        self.name = name
        self._streams = streams

    def record(self) -> Event:
        return _CheckedEvent(self._streams, self._streams.launch(self.name))

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, _CheckedEvent)
        self._streams.stream_waits(self.name, event.clock)


class CheckedStreams(Streams):
    """One simulated device in the memory of the CPU.

    Inside `checking()` the operations of this thread are checked; inside `on` those of any thread.
    Raises StreamOrderError, naming both streams and the tensor, for

    - a read or write of bytes that work on another stream, or the host, may still write;
    - a write of bytes that those may still read;
    - a use on another stream than that on which the tensor was made, without `record_stream`.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.host_syncs: list[str] = []
        """The operations so far for which the host would have had to wait."""
        self._lock = threading.RLock()
        self._clocks: dict[str, Clock] = {}
        self._memory: dict[int, _Memory] = {}
        self._here = threading.local()

    # -- streams

    def current(self) -> Stream:
        """The stream of the innermost `on` of this thread, or the default one."""
        return _CheckedStream(self, self._current)

    def side(self, purpose: str) -> Stream:
        """The stream for `purpose`."""
        return _CheckedStream(self, f"{purpose} stream")

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make `stream` this thread's current one."""
        before, self._here.stream = self._current, stream.name
        try:
            with self.checking():
                yield
        finally:
            self._here.stream = before

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Check every operation of torch on this thread."""
        if getattr(self._here, "is_checked", False):
            yield
            return
        self._here.is_checked = True
        try:
            with _Watch(self):
                yield
        finally:
            self._here.is_checked = False

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Allow `stream` to use `tensor`."""
        with self._lock:
            self._memory_of(tensor).known_to.add(stream.name)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory that streams and host may use, in order."""
        made = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        with self._lock:
            self._memory[made.untyped_storage().data_ptr()] = _Memory(is_host=True, name="a host buffer")
        return made

    # -- what tests tell it

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Call the memory of `tensor` by `name` in errors."""
        with self._lock:
            self._memory_of(tensor).name = name

    def host_reads(self, tensor: torch.Tensor, what: str, thread: str | None = None) -> str:
        """The host, such as a transport, reads `tensor` now, in `thread` (None: this one); that thread."""
        return self._host_uses(tensor, what, thread or self._host, writes=False)

    def host_writes(self, tensor: torch.Tensor, what: str, thread: str | None = None) -> str:
        """The host writes `tensor` now, in `thread` (None: this one); that thread."""
        return self._host_uses(tensor, what, thread or self._host, writes=True)

    def _host_uses(self, tensor: torch.Tensor, what: str, thread: str, *, writes: bool) -> str:
        with self._lock:
            self._access(self._tick(thread), thread, tensor, what, writes=writes)
        return thread

    # -- clocks

    def launch(self, stream: str) -> Clock:
        """What is done before whatever `stream` starts next: its own work, and what this thread knows of."""
        with self._lock:
            _join(self._clock(stream), self._clock(self._host))
            return dict(self._clock(stream))

    def stream_waits(self, stream: str, clock: Clock) -> None:
        """All further work of `stream` comes behind what `clock` has."""
        with self._lock:
            _join(self._clock(stream), clock)

    def host_waits(self, clock: Clock) -> None:
        """This thread has waited for what `clock` has."""
        with self._lock:
            _join(self._clock(self._host), clock)

    @property
    def _current(self) -> str:
        return getattr(self._here, "stream", _DEFAULT)

    @property
    def _host(self) -> str:
        return f"host thread {threading.current_thread().name}"

    def _clock(self, agent: str) -> Clock:
        return self._clocks.setdefault(agent, {})

    def _tick(self, agent: str) -> int:
        clock = self._clock(agent)
        clock[agent] = clock.get(agent, 0) + 1
        return clock[agent]

    # -- accesses

    def run(
        self,
        what: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        call: Callable[[], Any],
        used: set[int],
    ) -> Any:  # noqa: ANN401 - whatever the operation returns
        """Check and note one operation on the current stream; `used` are the storages given to it."""
        agent = self._current
        with self._lock:
            self.launch(agent)
            tick = self._tick(agent)
            for tensors, is_write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    self._access(tick, agent, tensor, what, writes=is_write)
        result = call()
        with self._lock:
            for made in tree_leaves(result):
                if isinstance(made, torch.Tensor) and made.device.type == "cpu":
                    key = made.untyped_storage().data_ptr()
                    if key and key not in used:  # memory that came out of the allocator just now
                        size = made.untyped_storage().nbytes()
                        written = _Access(agent, tick, 0, size, what)
                        self._memory[key] = _Memory(made_on=agent, writes=[written])
            if any(what.startswith(f"aten.{name}.") for name in _WAITING):
                self.host_syncs.append(what)
                self.host_waits(self._clock(agent))
        return result

    def _memory_of(self, tensor: torch.Tensor) -> _Memory:
        return self._memory.setdefault(tensor.untyped_storage().data_ptr(), _Memory())

    def _access(self, tick: int, agent: str, tensor: torch.Tensor, what: str, *, writes: bool) -> None:
        if not tensor.numel() or tensor.device.type != "cpu":
            return
        memory, known = self._memory_of(tensor), self._clock(agent)
        start, stop = _bytes_of(tensor)
        used = _Access(agent, tick, start, stop, what)
        for before in (*memory.writes, *(memory.reads if writes else ())):
            overlaps = before.start < stop and start < before.stop
            if overlaps and before.agent != agent and before.tick > known.get(before.agent, 0):
                verb, earlier = "writes" if writes else "reads", before in memory.writes
                raise StreamOrderError(
                    f"{what} on the {agent} {verb} {_describe(memory, tensor)}, and the {before.agent} may "
                    f"still {'write' if earlier else 'read'} it ({before.what}): no event lies between them"
                )
        is_stream = not agent.startswith("host")
        if is_stream and not memory.is_host and agent not in (memory.made_on, *memory.known_to):
            raise StreamOrderError(
                f"{what} on the {agent} uses {_describe(memory, tensor)}, which was made on the "
                f"{memory.made_on}, without record_stream"
            )
        if writes:
            memory.writes = [*(each for each in memory.writes if not _covers(used, each)), used]
            memory.reads = [each for each in memory.reads if not _covers(used, each)]
        else:
            mine = (each for each in memory.reads if each.agent != agent or not _covers(used, each))
            memory.reads = [*mine, used]


class _Watch(TorchDispatchMode):
    """Shows every operation of a thread to the streams."""

    def __init__(self, streams: CheckedStreams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._streams = streams

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an operator of torch, which has no type of its own
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        used: set[int] = set()
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            tensors = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
            used.update(each.untyped_storage().data_ptr() for each in tensors if not each.is_sparse)
            tensors = [each for each in tensors if not each.is_sparse]
            alias = argument.alias_info
            if alias is None:
                reads += tensors
            elif alias.is_write:
                writes += tensors
            elif func is torch.ops.aten.lift_fresh.default:
                used.clear()  # torch.tensor has made it just now
            # else a view of it comes out, and nothing is read
        return self._streams.run(str(func), reads, writes, lambda: func(*args, **kwargs), used)


def _join(clock: Clock, other: Clock) -> None:
    for agent, tick in other.items():
        clock[agent] = max(clock.get(agent, 0), tick)


def _covers(one: _Access, other: _Access) -> bool:
    return one.start <= other.start and other.stop <= one.stop


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one behind the last."""
    last = sum((int(n) - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + (last + 1) * tensor.itemsize


def _describe(memory: _Memory, tensor: torch.Tensor) -> str:
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    return f"{memory.name} ({kind})" if memory.name else f"a tensor {kind}"
