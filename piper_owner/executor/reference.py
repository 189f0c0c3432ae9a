"""The reference: the whole model in one process, an ordinary training loop, no pipeline."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from piper_owner.data.batches import Batch
from piper_owner.executor.config import TrainConfig
from piper_owner.executor.optimizers import optimizer_factory
from piper_owner.executor.plan import gpt_config, torch_dtype
from piper_owner.executor.session import RankReport, StepReport
from piper_owner.models.gpt import TIE, build_model, lm_loss
from piper_owner.stepping import state_bytes
from piper_owner.transport.messages import BytesSent

__all__ = ["ReferenceSession"]


class ReferenceSession:
    """Trains the run's model, microbatch by microbatch, with one optimizer over one copy of it."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._model = build_model(gpt_config(config), dtype=torch_dtype(config), seed=config.seed)
        self._optimizer = optimizer_factory(config.optimizer, config.learning_rate)(
            list(self._model.parameters())
        )
        self._tied_grads = 0

    def train_step(self, batch: Batch) -> StepReport:
        """One optimizer step over the batch."""
        start = time.perf_counter()
        loss = 0.0
        ids, labels = torch.from_numpy(batch.ids), torch.from_numpy(batch.labels)
        for microbatch in range(len(ids)):
            share = lm_loss(self._model(ids[microbatch]), labels[microbatch], num_tokens=batch.num_tokens)
            torch.autograd.backward(share)
            loss += float(share.detach())
        if self._config.clip is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.clip)
        grad = self._tied().grad
        self._tied_grads = max(self._tied_grads, 0 if grad is None else grad.nbytes)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepReport(loss=loss, seconds=time.perf_counter() - start, bytes_sent=BytesSent())

    def report(self) -> RankReport:
        """The memory of the process."""
        tied = self._tied()
        return RankReport(
            tied_weights=tied.nbytes,
            tied_grads=self._tied_grads,
            tied_optimizer=state_bytes(self._optimizer, tied),
            optimizer_state=sum(state_bytes(self._optimizer, p) for p in self._model.parameters()),
        )

    def weights(self) -> dict[str, Tensor]:
        """Every parameter by name, copied; the tied one under both of its names."""
        return {n: p.detach().clone() for n, p in self._model.named_parameters(remove_duplicate=False)}

    def close(self) -> None:
        """Nothing to close."""

    def _tied(self) -> Tensor:
        return self._model.get_parameter(TIE.name)
