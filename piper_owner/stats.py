"""What one optimizer step moved, and where its time went."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from piper_owner.transport.messages import BytesSent

__all__ = ["StepClock", "StepSeconds", "StepStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of one rank's step by phase; none is counted in two.

    rows: fetching rows, or serving them: `prefetch`, and what the next step is given.
    grads: waiting for the gradients of ties, and receiving them.
    ties: adding them up, stepping the ties that this rank owns, and starting to send their weights.
    rest: the inner optimizer's step of everything else; of ties too where they are stepped with it
        (after clipping, or an optimizer that is not element-wise).
    weights: waiting for the new weights of replicas, and receiving them.
    flush: waiting until the peers have all that was sent.
    """

    rows: float = 0.0
    grads: float = 0.0
    ties: float = 0.0
    rest: float = 0.0
    weights: float = 0.0
    flush: float = 0.0

    @property
    def total(self) -> float:
        """All phases together."""
        return self.rows + self.grads + self.ties + self.rest + self.weights + self.flush


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One step of one rank: payload bytes of the tied sync by kind, and seconds by phase.

    What travelled early, while a schedule still ran, is among the bytes; its time is the schedule's. What
    `finalize_grads`, `clip_grad_norm_` and `unscale_` did for the step counts with it. Norms, and
    the checks and values of `Ownership.check` and `sync`, do not.
    """

    sent: BytesSent = field(default_factory=BytesSent)
    """Bytes that this rank sent."""
    received: BytesSent = field(default_factory=BytesSent)
    """Bytes that its peers sent it."""
    seconds: StepSeconds = field(default_factory=StepSeconds)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready `{sent: {ids, rows, grads, weights, other}, received: {...}, seconds: {...}}`."""
        return asdict(self)


class StepClock:
    """Adds up the seconds of a step; each attribute is a phase of `StepSeconds`."""

    __slots__ = ("flush", "grads", "rest", "rows", "ties", "weights")

    def __init__(self) -> None:
        self.rows = self.grads = self.ties = self.rest = self.weights = self.flush = 0.0

    def take(self) -> StepSeconds:
        """The seconds since the last call."""
        taken = StepSeconds(
            rows=self.rows,
            grads=self.grads,
            ties=self.ties,
            rest=self.rest,
            weights=self.weights,
            flush=self.flush,
        )
        self.rows = self.grads = self.ties = self.rest = self.weights = self.flush = 0.0
        return taken
