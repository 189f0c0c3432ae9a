"""The pipeline's own messages of one rank: activations forward, their gradients back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

import torch
from torch import Tensor

from piper_owner.dag.nodes import Transfer, TransferKind
from piper_owner.executor.ports import StagePorts, crossing_values
from piper_owner.transport.messages import Line
from piper_owner.transport.wire import Header, Phase

__all__ = ["Mailbox"]


class Mailbox:
    """Activations and gradients on their way into and out of this rank's stages.

    What crosses from one stage to another is a bundle: the outputs of the one that the other takes,
    ascending, or their gradients. A bundle between ranks is one message for each of them. Stages on
    one rank hand bundles over here without a message. What arrives is put on `device` (None: the CPU).
    """

    def __init__(
        self, lines: Mapping[int, Line], ports: Sequence[StagePorts], device: torch.device | None = None
    ) -> None:
        self.lines = dict(lines)
        self._device = torch.device("cpu") if device is None else device
        self._ports = ports
        self._crossing = crossing_values(ports)
        self._leaving: list[list[int]] = [[] for _ in ports]
        self._entering: list[list[int]] = [[] for _ in ports]
        for early, late in self._crossing:
            self._leaving[early].append(late)
            self._entering[late].append(early)
        # By (earlier stage, later stage, microbatch).
        self._activations: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}
        self._grads: dict[tuple[int, int, int], tuple[Tensor | None, ...]] = {}

    # -- what the stages make and take

    def put_outputs(self, stage: int, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """`stage` has made its outputs: each later stage gets those that it takes."""
        for late in self._leaving[stage]:
            values = self._crossing[stage, late]
            self._activations[stage, late, microbatch] = tuple(outputs[index] for index in values)

    def take_inputs(self, stage: int, microbatch: int, model_inputs: Sequence[Tensor]) -> list[Tensor]:
        """The arguments of the forward of `stage`."""
        sources = self._ports[stage].inputs
        bundles = {
            early: self._activations.pop((early, stage, microbatch)) for early in self._entering[stage]
        }
        return [
            model_inputs[source.index]
            if source.stage is None
            else bundles[source.stage][self._crossing[source.stage, stage].index(source.index)]
            for source in sources
        ]

    def put_input_grads(self, stage: int, microbatch: int, grads: Sequence[Tensor | None]) -> None:
        """`stage` has made the gradients of its inputs: each goes to the stage that made the value."""
        sources = self._ports[stage].inputs
        for early in self._entering[stage]:
            parts: dict[int, list[Tensor | None]] = {index: [] for index in self._crossing[early, stage]}
            for source, grad in zip(sources, grads, strict=True):
                if source.stage == early:
                    parts[source.index].append(grad)
            self._grads[early, stage, microbatch] = tuple(map(_sum, parts.values()))

    def take_output_grads(self, stage: int, microbatch: int) -> tuple[Tensor | None, ...]:
        """The gradients of the outputs of `stage`, summed over the stages that take them, ascending."""
        parts: list[list[Tensor | None]] = [[] for _ in range(self._ports[stage].num_outputs)]
        for late in self._leaving[stage]:
            bundle = self._grads.pop((stage, late, microbatch))
            for index, grad in zip(self._crossing[stage, late], bundle, strict=True):
                parts[index].append(grad)
        return tuple(map(_sum, parts))

    # -- messages

    def run(self, node: Transfer, step: int) -> None:
        """Send or receive one bundle. Raises ExchangeError when the peer fails."""
        stage, peer, microbatch = node.stage, node.peer_stage, node.microbatch
        match node.kind:
            case TransferKind.SEND_ACTIVATION:
                self._send(Phase.ACTIVATION, node, self._activations.pop((stage, peer, microbatch)), step)
            case TransferKind.SEND_INPUT_GRAD:
                self._send(Phase.INPUT_GRAD, node, self._grads.pop((peer, stage, microbatch)), step)
            case TransferKind.RECV_ACTIVATION:
                received = self._receive(Phase.ACTIVATION, node, len(self._crossing[peer, stage]), step)
                bundle = tuple(tensor for tensor in received if tensor is not None)
                assert len(bundle) == len(received), "a stage always has its outputs"
                self._activations[peer, stage, microbatch] = bundle
            case TransferKind.RECV_INPUT_GRAD:
                received = self._receive(Phase.INPUT_GRAD, node, len(self._crossing[stage, peer]), step)
                self._grads[stage, peer, microbatch] = tuple(received)
            case _:
                assert_never(node.kind)

    def _send(self, phase: Phase, node: Transfer, bundle: Sequence[Tensor | None], step: int) -> None:
        line = self.lines[node.peer]
        for place, tensor in enumerate(bundle):
            dtype, shape = (torch.float32, ()) if tensor is None else (tensor.dtype, tuple(tensor.shape))
            subject = _subject(node.stage, place, len(bundle))
            header = Header(
                phase=phase, subject=subject, step=step, dtype=dtype, shape=shape, microbatch=node.microbatch
            )
            # The line carries host memory; a tensor that is there is sent as it is.
            line.send(header, None if tensor is None else tensor.to("cpu").contiguous())

    def _receive(self, phase: Phase, node: Transfer, count: int, step: int) -> list[Tensor | None]:
        line = self.lines[node.peer]
        received: list[Tensor | None] = []
        for place in range(count):
            expected = Header(
                phase=phase,
                subject=_subject(node.peer_stage, place, count),
                step=step,
                dtype=torch.float32,
                shape=(),
                microbatch=node.microbatch,
            )
            tensor = line.receive(expected, any_tensor=True).tensor()
            received.append(None if tensor is None else tensor.to(self._device))
        return received

    def flush(self) -> None:
        """Wait until every peer has received all that this rank sent."""
        for line in self.lines.values():
            line.flush()

    def close(self) -> None:
        """Close every line."""
        for line in self.lines.values():
            line.close()


def _subject(stage: int, place: int, count: int) -> str:
    return f"stage {stage}" if count == 1 else f"stage {stage}, value {place + 1} of {count}"


def _sum(grads: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of those that are there, in order; None if none is."""
    present = [grad for grad in grads if grad is not None]
    if len(present) < 2:
        return present[0] if present else None
    total = present[0].clone()  # a gradient may share its storage with another
    for grad in present[1:]:
        total += grad
    return total
