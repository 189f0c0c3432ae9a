"""What a rank does with rows in one optimizer step: fetch them before it, turn to the next ones after it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from piper_owner.assignment import Ownership
from piper_owner.dag.nodes import SyncKind
from piper_owner.errors import ConfigError
from piper_owner.p2p_nodes import fetch_nodes

__all__ = ["Prefetcher"]


class Prefetcher:
    """Runs the fetches of one rank of `ownership`. Does nothing where no tie keeps rows."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._exchange = ownership.exchange
        self._nodes = fetch_nodes(ownership.plan.ties, ownership.rank)
        self._has_rows = bool(ownership.plan.row_pairs)

    def fetch(self, ids: Sequence[Tensor | None], *, next_step: bool, is_exchanged: bool) -> None:
        """See `OwnerOptimizer.prefetch`; `is_exchanged`: gradients of this step were sent. Collective."""
        self._ownership.refuse_closed()
        if not self._has_rows:
            return
        start, step = time.perf_counter(), self._ownership.step
        given = [each for each in ids if each is not None]

        def check() -> None:
            if is_exchanged and not next_step:
                raise ConfigError(
                    f"rank {self._ownership.rank}: prefetch in step {step}, after its gradients were sent; "
                    "call it before the forward, or give next_step=True"
                )
            self._exchange.fetching.check(given)

        self._ownership.agree_on(f"prefetch of step {step}", check)
        with self._ownership.reporting(f"prefetch of step {step}"):
            self._exchange.fetching.want(given, next_step=next_step)
            for node in self._nodes:
                if not next_step or node.kind in (SyncKind.SEND_IDS, SyncKind.RECV_IDS):
                    self._exchange.run(node, step)
        self._exchange.clock.rows += time.perf_counter() - start

    def end_step(self) -> None:
        """The weights are new, or the step was skipped: rows that were fetched are of no use any more.

        Those requested for the next step come now.
        """
        if self._has_rows:
            start = time.perf_counter()
            self._exchange.fetching.end_step(self._nodes, self._ownership.step)
            self._exchange.clock.rows += time.perf_counter() - start
