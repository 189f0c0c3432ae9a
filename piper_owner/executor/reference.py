"""The reference: the whole model in one process, an ordinary training loop, no pipeline."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from piper_owner.data.batches import Batch
from piper_owner.executor.config import TrainConfig
from piper_owner.executor.devices import finish_work, rank_device
from piper_owner.executor.optimizers import optimizer_factory
from piper_owner.executor.session import RankReport, StepReport
from piper_owner.executor.source import GPTSource, ModelSource, SplitModel
from piper_owner.models.gpt import lm_loss
from piper_owner.stepping import state_bytes, tensor_bytes
from piper_owner.transport.messages import BytesSent

__all__ = ["ReferenceSession"]


class ReferenceSession:
    """Trains the run's model, microbatch by microbatch, with one optimizer over one copy of it.

    `device` is where it does so; None: the first one of the config's kind.
    """

    def __init__(
        self, config: TrainConfig, source: ModelSource | None = None, *, device: torch.device | None = None
    ) -> None:
        source = GPTSource() if source is None else source
        self._config = config = source.resolve(config)
        self._device = rank_device(config) if device is None else device
        self._model = source.build_model(config).to(self._device)
        self._optimizer = optimizer_factory(config.optimizer, config.learning_rate)(
            list(self._model.parameters())
        )
        self._tied = _tied(self._model, source.split(config, device="meta"))
        self._tied_grads = 0

    def train_step(self, batch: Batch) -> StepReport:
        """One optimizer step over the batch."""
        start = time.perf_counter()
        loss = 0.0
        ids = torch.from_numpy(batch.ids).to(self._device)
        labels = torch.from_numpy(batch.labels).to(self._device)
        for microbatch in range(len(ids)):
            share = lm_loss(self._model(ids[microbatch]), labels[microbatch], num_tokens=batch.num_tokens)
            torch.autograd.backward(share)
            loss += float(share.detach())
        if self._config.clip is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.clip)
        grads = sum(tensor_bytes(tied.grad) for tied in self._tied)
        self._tied_grads = max(self._tied_grads, grads)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        finish_work(self._device)
        return StepReport(loss=loss, seconds=time.perf_counter() - start, bytes_sent=BytesSent())

    def report(self) -> RankReport:
        """The memory of the process."""
        return RankReport(
            tied_weights=sum(tied.nbytes for tied in self._tied),
            tied_grads=self._tied_grads,
            tied_optimizer=sum(state_bytes(self._optimizer, tied) for tied in self._tied),
            optimizer_state=sum(state_bytes(self._optimizer, p) for p in self._model.parameters()),
        )

    def weights(self) -> dict[str, Tensor]:
        """Every parameter by name, copied to the CPU; the tied one under both of its names."""
        named = self._model.named_parameters(remove_duplicate=False)
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in named}

    def close(self) -> None:
        """Nothing to close."""

    def abandon(self) -> None:
        """Nothing to close."""


def _tied(model: nn.Module, split: SplitModel) -> list[nn.Parameter]:
    """The tied parameters of `model`, each once: a tie may have names that only its stages have."""
    held = dict(model.named_parameters(remove_duplicate=False))
    return [next(held[name] for name in tie.names if name in held) for tie in split.ties]
