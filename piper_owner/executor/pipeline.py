"""The pipeline's own messages of one rank: activations forward, their gradients back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

import torch
from torch import Tensor

from piper_owner.dag.nodes import Transfer, TransferKind
from piper_owner.transport.messages import Line
from piper_owner.transport.wire import Header, Phase

__all__ = ["Mailbox"]


class Mailbox:
    """Activations and gradients on their way into and out of this rank's stages.

    Keys are (stage, microbatch) of the stage that made the tensor: its activation, or the
    gradient of its input. Stages on one rank hand tensors over here without a message.
    """

    def __init__(self, lines: Mapping[int, Line]) -> None:
        self.lines = dict(lines)
        self._activations: dict[tuple[int, int], Tensor] = {}
        self._grads: dict[tuple[int, int], Tensor | None] = {}

    def put_activation(self, stage: int, microbatch: int, tensor: Tensor) -> None:
        """`stage` has made its output."""
        self._activations[stage, microbatch] = tensor

    def take_activation(self, stage: int, microbatch: int) -> Tensor:
        """The output of `stage`, for the stage after it."""
        return self._activations.pop((stage, microbatch))

    def put_grad(self, stage: int, microbatch: int, tensor: Tensor | None) -> None:
        """`stage` has made the gradient of its input."""
        self._grads[stage, microbatch] = tensor

    def take_grad(self, stage: int, microbatch: int) -> Tensor | None:
        """The gradient of the input of `stage`, for the stage before it."""
        return self._grads.pop((stage, microbatch))

    def run(self, node: Transfer, step: int) -> None:
        """Send or receive one message. Raises ExchangeError when the peer fails."""
        line = self.lines[node.peer]
        match node.kind:
            case TransferKind.SEND_ACTIVATION:
                tensor: Tensor | None = self.take_activation(node.stage, node.microbatch)
                self._send(line, Phase.ACTIVATION, node.stage, node, tensor, step)
            case TransferKind.SEND_INPUT_GRAD:
                tensor = self.take_grad(node.stage, node.microbatch)
                self._send(line, Phase.INPUT_GRAD, node.stage, node, tensor, step)
            case TransferKind.RECV_ACTIVATION:
                tensor = self._receive(line, Phase.ACTIVATION, node, step)
                assert tensor is not None, "a stage always has an output"
                self.put_activation(node.peer_stage, node.microbatch, tensor)
            case TransferKind.RECV_INPUT_GRAD:
                tensor = self._receive(line, Phase.INPUT_GRAD, node, step)
                self.put_grad(node.peer_stage, node.microbatch, tensor)
            case _:
                assert_never(node.kind)

    def _send(
        self, line: Line, phase: Phase, stage: int, node: Transfer, tensor: Tensor | None, step: int
    ) -> None:
        dtype, shape = (torch.float32, ()) if tensor is None else (tensor.dtype, tuple(tensor.shape))
        header = _header(phase, stage, node.microbatch, step, dtype, shape)
        line.send(header, None if tensor is None else tensor.contiguous())

    def _receive(self, line: Line, phase: Phase, node: Transfer, step: int) -> Tensor | None:
        expected = _header(phase, node.peer_stage, node.microbatch, step, torch.float32, ())
        return line.receive(expected, any_tensor=True).tensor()

    def flush(self) -> None:
        """Wait until every peer has received all that this rank sent."""
        for line in self.lines.values():
            line.flush()

    def close(self) -> None:
        """Close every line."""
        for line in self.lines.values():
            line.close()


def _header(
    phase: Phase, stage: int, microbatch: int, step: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Header:
    return Header(
        phase=phase, subject=f"stage {stage}", step=step, dtype=dtype, shape=shape, microbatch=microbatch
    )
