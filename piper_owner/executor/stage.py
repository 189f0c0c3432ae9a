"""One pipeline stage at work: forwards, and backwards whole or in two parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["LossFunction", "StageRunner"]

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(output of the last stage, labels) of a microbatch -> its share of the batch's loss, a scalar."""


@dataclass(slots=True)
class _InFlight:
    """A microbatch between its forward and the end of its backward."""

    inputs: Tensor
    output: Tensor
    grad: Tensor | None = None


class StageRunner:
    """Runs one stage's module, microbatch by microbatch, in the order it is told.

    Between stages go tensors; a floating-point input gets a gradient, which goes back. The last
    stage applies `loss`, and its backward starts there.
    """

    def __init__(self, module: nn.Module, loss: LossFunction | None) -> None:
        self.module = module
        self.loss = loss
        self._in_flight: dict[int, _InFlight] = {}

    def forward(self, microbatch: int, inputs: Tensor, labels: Tensor | None) -> Tensor:
        """The output of the stage or, on the last one, the microbatch's share of the loss."""
        inputs = inputs.detach()
        if inputs.is_floating_point():
            inputs.requires_grad_()
        output: Tensor = self.module(inputs)
        if self.loss is not None and labels is not None:
            output = self.loss(output, labels)
        self._in_flight[microbatch] = _InFlight(inputs, output)
        return output.detach()

    def backward(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """Add to the parameters' gradients; the gradient of the input, if it has one.

        `grad` is that of the stage's output: None on the last stage, where the loss starts, and
        None elsewhere when nothing after this stage depends on its output.
        """
        state = self._in_flight.pop(microbatch)
        if self._has_backward(state, grad):
            torch.autograd.backward(state.output, grad)
        return state.inputs.grad

    def backward_input(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """The gradient of the input only; the parameters' follow in `backward_weight`."""
        state = self._in_flight[microbatch]
        state.grad = grad
        if not (state.inputs.requires_grad and self._has_backward(state, grad)):
            return None
        (result,) = torch.autograd.grad(
            state.output, state.inputs, grad, retain_graph=True, allow_unused=True
        )
        return result

    def backward_weight(self, microbatch: int) -> None:
        """Add to the parameters' gradients what `backward_input` left out."""
        state = self._in_flight.pop(microbatch)
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if parameters and self._has_backward(state, state.grad):
            torch.autograd.backward(state.output, state.grad, inputs=parameters)

    def _has_backward(self, state: _InFlight, grad: Tensor | None) -> bool:
        # torch would start at a scalar output without a gradient as if it were the loss.
        starts = grad is not None or self.loss is not None
        return starts and state.output.requires_grad

    @property
    def num_in_flight(self) -> int:
        """Microbatches between their forward and the end of their backward."""
        return len(self._in_flight)
