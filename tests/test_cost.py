"""The cost of a tie, against what a run measures and what the README prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from piper_owner.cost import HolderCost, TieCost, Way, row_capacity, tie_cost
from piper_owner.data.batches import TokenStream
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.local import train_in_process

ROOT = Path(__file__).resolve().parent.parent
VOCAB, HIDDEN = 300, 16


@pytest.mark.parametrize(
    ("way", "kind", "layout"),
    [
        (Way.ALL_REDUCE, RunKind.ALLREDUCE, "dense"),
        (Way.DENSE, RunKind.OWNER, "dense"),
        (Way.ROWS, RunKind.OWNER, "rows"),
    ],
)
def test_it_is_what_a_run_measures(way: Way, kind: RunKind, layout: str) -> None:
    config = TrainConfig(
        stages=2, microbatches=4, microbatch_size=2, sequence_length=16, vocab=VOCAB, hidden=HIDDEN, heads=2,
        layers=2, steps=2, optimizer="adamw", timeout_seconds=20, layout=layout,  # type: ignore[arg-type]
    )  # fmt: skip
    stream = TokenStream(
        np.random.default_rng(0).integers(0, VOCAB, 4000),
        microbatches=4,
        microbatch_size=2,
        sequence_length=16,
    )
    run = train_in_process(config, stream, compare=(RunKind.ALLREDUCE,)).runs[kind]
    num_rows = len(np.unique(stream.batch(1).ids))
    cost = tie_cost(way, shape=(VOCAB, HIDDEN), num_rows=num_rows)
    sent = [run.bytes_sent_per_step[rank] for rank in range(2)]
    assert max(each.ids + each.rows + each.grads + each.weights for each in sent) == cost.wire
    counter = 4  # the step of Adam
    for holder, tied in zip((cost.lookup, cost.dense), run.tied_bytes.values(), strict=True):
        assert tied.optimizer == holder.optimizer + (counter if holder.optimizer else 0)
        if way is Way.ROWS and holder is cost.lookup:
            assert tied.weights == tied.grads <= holder.weights == row_capacity(num_rows) * HIDDEN * 4
        else:
            assert (tied.weights, tied.grads) == (holder.weights, holder.grads)


def test_few_rows_take_the_least_capacity() -> None:
    cost = tie_cost(Way.ROWS, shape=(1000, 8), num_rows=3, itemsize=2, state_itemsize=12)
    owner = HolderCost(weights=16_000, grads=16_000, optimizer=96_000)
    assert cost == TieCost(
        wire=3 * (16 + 4), lookup=HolderCost(weights=1024, grads=1024, optimizer=0), dense=owner
    )
    assert owner.total == 128_000


def test_the_readme_has_the_table_of_the_script() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "cost_table.py")]
    printed = subprocess.run(script, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60)
    found = re.search(r"<!-- cost -->\n(.*?)<!-- /cost -->", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    assert found[1] == printed.stdout
