"""One pipeline stage at work: forwards, and backwards whole or in two parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from piper_owner.errors import ConfigError
from piper_owner.executor.ports import StagePorts
from piper_owner.executor.split_backward import WeightBackward, backward_input

__all__ = ["LossFunction", "StageRunner", "Tensors"]

LossFunction = Callable[[Any, Tensor], Tensor]
"""(the last stage's output, or the tuple of its outputs, labels) of a microbatch -> its share of the
batch's loss, a scalar."""

Tensors = Tensor | tuple[Tensor, ...]
"""One tensor, or several."""


@dataclass(slots=True)
class _InFlight:
    """A microbatch between its forward and the end of its backward."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    grads: tuple[Tensor | None, ...] = ()


class StageRunner:
    """Runs one stage's module, microbatch by microbatch, in the order it is told.

    Between stages go tensors; a floating-point value that another stage made gets a gradient, which
    goes back. The last stage, which has a `loss`, applies it, and its backward starts there.
    """

    def __init__(self, module: nn.Module, ports: StagePorts, loss: LossFunction | None) -> None:
        self.module = module
        self.ports = ports
        self.loss = loss
        self._in_flight: dict[int, _InFlight] = {}
        self._pending: dict[int, WeightBackward] = {}

    def forward(self, microbatch: int, inputs: Sequence[Tensor], labels: Tensor | None) -> tuple[Tensor, ...]:
        """The outputs of the stage or, on the last one, the microbatch's share of the loss alone.

        Raises ConfigError when the module does not give what its ports say.
        """
        entering = tuple(value.detach() for value in inputs)
        for value, source in zip(entering, self.ports.inputs, strict=True):
            if source.stage is not None and value.is_floating_point():
                value.requires_grad_()
        made: Tensors = self.module(*entering)
        outputs = self._checked(made)
        if self.loss is not None and labels is not None:
            outputs = (self.loss(outputs[0] if len(outputs) == 1 else outputs, labels),)
        self._in_flight[microbatch] = _InFlight(entering, outputs)
        return tuple(output.detach() for output in outputs)

    def _checked(self, made: Tensors) -> tuple[Tensor, ...]:
        outputs = (made,) if isinstance(made, Tensor) else tuple(made)
        if len(outputs) != self.ports.num_outputs or not all(isinstance(o, Tensor) for o in outputs):
            raise ConfigError(
                f"{type(self.module).__name__} gave {[type(output).__name__ for output in outputs]}; its "
                f"ports promise {self.ports.num_outputs} tensor(s)"
            )
        return outputs

    def backward(self, microbatch: int, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Add to the parameters' gradients; the gradient of each input, None where it has none.

        `grads` are those of the outputs, in order: none on the last stage, where the loss starts, and
        None for an output on which nothing depends.
        """
        state = self._in_flight.pop(microbatch)
        state.grads = tuple(grads)
        outputs, starts = self._starts(state)
        if outputs:
            torch.autograd.backward(outputs, starts)
        return tuple(value.grad for value in state.inputs)

    def backward_input(self, microbatch: int, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs only; the parameters' follow in `backward_weight`."""
        state = self._in_flight.pop(microbatch)
        state.grads = tuple(grads)
        outputs, starts = self._starts(state)
        wanted = [index for index, value in enumerate(state.inputs) if value.requires_grad]
        found, rest = backward_input(outputs, starts, [state.inputs[index] for index in wanted])
        self._pending[microbatch] = rest
        results: list[Tensor | None] = [None] * len(state.inputs)
        for index, grad in zip(wanted, found, strict=True):
            results[index] = grad
        return tuple(results)

    def backward_weight(self, microbatch: int) -> None:
        """Add to the parameters' gradients what `backward_input` left out."""
        self._pending.pop(microbatch).run()

    def _starts(self, state: _InFlight) -> tuple[list[Tensor], list[Tensor | None]]:
        """The outputs where the backward starts, and their gradients (None: the loss itself)."""
        if self.loss is not None:
            return ([output for output in state.outputs if output.requires_grad], [None])
        # torch would start at a scalar output without a gradient as if it were the loss.
        pairs = [
            (output, grad)
            for output, grad in zip(state.outputs, state.grads, strict=True)
            if grad is not None and output.requires_grad
        ]
        return [output for output, _ in pairs], [grad for _, grad in pairs]

    @property
    def num_in_flight(self) -> int:
        """Microbatches between their forward and the end of their backward."""
        return len(self._in_flight) + len(self._pending)
