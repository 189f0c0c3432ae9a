"""Scripted faults: at one rank, in one step, at one action of its TrainingDAG, something goes wrong.

An `Injector` is that rank's StepObserver, so it knows when the action runs, and it wraps the rank's
fabric, so that it can damage, drop or repeat what the action sends or receives. Nothing of the
package or of torch is replaced.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor, nn

from piper_owner.dag.nodes import Action, format_action
from piper_owner.transport import Channel, Fabric, Group, Work
from piper_owner.transport.wire import HEADER_BYTES

__all__ = ["Fault", "FaultKind", "Injector", "PlantedError", "poison"]


class FaultKind(enum.Enum):
    """What goes wrong; the words stand in the table of results."""

    RAISE = "raise"
    EXIT = "exit"
    STOP = "stop"
    CORRUPT = "corrupt"
    DROP = "drop"
    REPEAT = "repeat"
    NAN = "nan"
    INF = "inf"


_MESSAGES = (FaultKind.CORRUPT, FaultKind.DROP, FaultKind.REPEAT)
_VALUES = {FaultKind.NAN: float("nan"), FaultKind.INF: float("inf")}


class PlantedError(ArithmeticError):
    """The error of FaultKind.RAISE."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`kind` at `rank`, as it runs `action` (its text form) in `step` (from 0).

    `seconds` is how long a STOP takes. CORRUPT flips byte `byte` of the first header that the action
    sends or receives; DROP and REPEAT are of the first message that it sends, payload included, or of
    its all-reduce. NAN and INF go into the first column of the gradient of `parameter`.
    """

    kind: FaultKind
    rank: int
    step: int
    action: str
    seconds: float = 0.0
    byte: int = 0
    parameter: str = ""


class Injector:
    """Makes `fault` happen; on every other rank it does nothing.

    `note` is called as the fault happens, with the time of the clock that all processes of a machine
    share. `parameters` gives the rank's parameters by name when a gradient is to be poisoned.
    """

    def __init__(
        self,
        fault: Fault,
        *,
        note: Callable[[float], None],
        parameters: Callable[[], Mapping[str, nn.Parameter]],
    ) -> None:
        self.fault = fault
        self._note, self._parameters = note, parameters
        self._is_armed = False
        self._line: Channel | None = None
        """The line whose message is being dropped or repeated."""
        self._kept: list[Tensor] = []

    def fabric(self, inner: Fabric) -> Fabric:
        """`inner` with what goes over it in the injector's hands."""
        return _FaultyFabric(inner, self) if inner.rank == self.fault.rank else inner

    @contextmanager
    def around(self, action: Action, step: int) -> Iterator[None]:
        """The seam: see StepObserver."""
        fault = self.fault
        if step != fault.step or format_action(action) != fault.action:
            yield
            return
        match fault.kind:
            case FaultKind.RAISE:
                self._note(time.monotonic())
                raise PlantedError(f"planted at {fault.action}")
            case FaultKind.EXIT:
                self._note(time.monotonic())
                os._exit(9)
            case FaultKind.STOP:
                self._note(time.monotonic())
                time.sleep(fault.seconds)  # the fault itself
                yield
            case FaultKind.CORRUPT | FaultKind.DROP | FaultKind.REPEAT:
                self._is_armed = True
                yield
                self._settle()
            case FaultKind.NAN | FaultKind.INF:
                # A backward is to add to a gradient before it is poisoned, all else finds it so.
                is_backward = fault.action.lstrip("0123456789")[:1] in "BW"
                if not is_backward:
                    self._poison()
                yield
                if is_backward:
                    self._poison()
            case _:
                assert_never(fault.kind)

    def _poison(self) -> None:
        self._note(time.monotonic())
        poison(self._parameters()[self.fault.parameter], _VALUES[self.fault.kind])

    # -- messages of the action

    def send(self, line: Channel, tensor: Tensor) -> Work:
        """What becomes of a send over `line`."""
        if not self._is_armed:
            return line.post_send(tensor)
        is_header = tensor.dtype is torch.uint8 and tensor.numel() == HEADER_BYTES
        if is_header and self.fault.kind is FaultKind.CORRUPT:
            self._is_armed = False
            self._note(time.monotonic())
            tensor = tensor.clone()
            tensor[self.fault.byte] ^= 255
            return line.post_send(tensor)
        if is_header and self._line is None:
            self._note(time.monotonic())
            self._line = line
        elif is_header and self._line is line:
            self._settle()  # the next message, which is right
            return line.post_send(tensor)
        if self._line is not line:
            return line.post_send(tensor)
        if self.fault.kind is FaultKind.DROP:
            return _Nothing()
        self._kept.append(tensor.detach().clone())
        return line.post_send(tensor)

    def receive(self, line: Channel, tensor: Tensor) -> Work:
        """What becomes of a receive over `line`."""
        is_header = tensor.dtype is torch.uint8 and tensor.numel() == HEADER_BYTES
        if self._is_armed and is_header and self.fault.kind is FaultKind.CORRUPT:
            self._is_armed = False
            self._note(time.monotonic())
            return _Damaged(line.post_recv(tensor), tensor, self.fault.byte)
        return line.post_recv(tensor)

    def all_reduce(self, group: Group, tensor: Tensor) -> None:
        """What becomes of an all-reduce."""
        is_armed, self._is_armed = self._is_armed, False
        if is_armed:
            self._note(time.monotonic())
        if is_armed and self.fault.kind is FaultKind.DROP:
            return
        if is_armed and self.fault.kind is FaultKind.REPEAT:
            group.all_reduce(tensor.clone())
        group.all_reduce(tensor)

    def _settle(self) -> None:
        """The message is over: send it again if that is the fault."""
        line, kept, self._line, self._kept, self._is_armed = self._line, self._kept, None, [], False
        for tensor in kept:
            assert line is not None
            line.post_send(tensor)


def poison(parameter: nn.Parameter, value: float) -> None:
    """Add `value` to the first column of the parameter's gradient."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad[..., 0] += value


class _Nothing:
    """The work of a message that was never sent."""

    def wait(self) -> None:
        """Done at once."""


class _Damaged:
    """A receive whose data is damaged on arrival."""

    def __init__(self, inner: Work, tensor: Tensor, byte: int) -> None:
        self._inner, self._tensor, self._byte = inner, tensor, byte

    def wait(self) -> None:
        """Wait, then damage it."""
        self._inner.wait()
        self._tensor[self._byte] ^= 255


class _FaultyChannel(Channel):
    def __init__(self, inner: Channel, injector: Injector) -> None:
        self.rank, self.peer, self.timeout = inner.rank, inner.peer, inner.timeout
        self._inner, self._injector = inner, injector

    def post_send(self, tensor: Tensor) -> Work:
        return self._injector.send(self._inner, tensor)

    def post_recv(self, tensor: Tensor) -> Work:
        return self._injector.receive(self._inner, tensor)

    def close(self) -> None:
        self._inner.close()


class _FaultyGroup(Group):
    def __init__(self, inner: Group, injector: Injector) -> None:
        self.ranks, self._inner, self._injector = inner.ranks, inner, injector

    def all_reduce(self, tensor: Tensor) -> None:
        self._injector.all_reduce(self._inner, tensor)

    def reduce(self, tensor: Tensor, root: int) -> None:
        self._inner.reduce(tensor, root)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._inner.broadcast(tensor, root)

    def close(self) -> None:
        self._inner.close()


class _FaultyFabric(Fabric):
    def __init__(self, inner: Fabric, injector: Injector) -> None:
        self.rank, self.world_size, self.timeout = inner.rank, inner.world_size, inner.timeout
        self.board, self._inner, self._injector = inner.board, inner, injector

    def channel(self, peer: int, purpose: str) -> Channel:
        return _FaultyChannel(self._inner.channel(peer, purpose), self._injector)

    def group(self, ranks: tuple[int, ...], purpose: str) -> Group:
        return _FaultyGroup(self._inner.group(ranks, purpose), self._injector)
