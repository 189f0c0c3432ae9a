"""A stream of chunks, played as two parts, against the same stream played chunk by chunk."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import plan_config

from piper_owner.ownership import ParameterUse, TiePlan, plan_ownership
from piper_owner.planning.config import Optimizer, PlanConfig, Transfer
from piper_owner.planning.streams import stream_times

COLUMNS = 64
CHUNK = 4 * COLUMNS * 4  # bytes of four rows


def tie_of(chunks: int) -> TiePlan:
    uses = [
        ParameterUse(name=name, rank=rank, stage=rank, shape=(4 * chunks, COLUMNS), dtype="float32")
        for rank, name in enumerate(("a", "b"))
    ]
    return plan_ownership([("a", "b")], uses, world_size=2)["a"]


def config_of(transfer: Transfer, rate: float, optimizer: Optimizer = Optimizer.ADAMW) -> PlanConfig:
    return plan_config(
        dtype="float32",
        transfer=transfer,
        bandwidth=rate,
        latency=0.25,
        chunk_bytes=CHUNK,
        optimizer=optimizer,
    )


def chunk_by_chunk(
    chunks: int, wire: float, step: float, sent: float, ready: float, *, early: bool
) -> tuple[float, float]:
    """When the owner is done, and when the replica has all weights."""
    begin = sent + 0.25 if early else max(sent + 0.25, ready)
    stepped = ready
    left = 0.0
    for chunk in range(chunks):
        stepped = max(stepped, begin + (chunk + 1) * wire / chunks) + step / chunks
        left = max(left, stepped) + wire / chunks
    return stepped, left + 0.25


TIMES = st.floats(0.0, 50.0)


@settings(max_examples=200, deadline=None)
@given(
    chunks=st.integers(1, 40),
    wire=st.floats(0.01, 20.0),
    step=st.floats(0.0, 20.0),
    sent=TIMES,
    ready=TIMES,
    transfer=st.sampled_from(Transfer),
)
def test_two_parts_end_when_the_chunks_do(
    chunks: int, wire: float, step: float, sent: float, ready: float, transfer: Transfer
) -> None:
    rate = chunks * CHUNK / wire
    first, rest = stream_times(tie_of(chunks), step, config_of(transfer, rate))
    begun = max(ready, sent + first.grad) + first.step
    done = max(begun, sent + rest.grad) + rest.step
    arrived = max(begun + first.weight, done + rest.weight)
    expected = chunk_by_chunk(chunks, wire, step, sent, ready, early=transfer is Transfer.EARLY)
    assert (done, arrived) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("transfer", Transfer)
def test_what_is_stepped_whole_goes_one_after_the_other(transfer: Transfer) -> None:
    rate = 8 * CHUNK / 3.0
    first, rest = stream_times(tie_of(8), 2.0, config_of(transfer, rate, Optimizer.ADAFACTOR))
    begun = 0.25 if transfer is Transfer.STREAMED else 3.25
    assert first.grad == rest.grad == pytest.approx(begun)
    assert begun + first.step == pytest.approx(0.25 + 3.0 + 2.0)
    assert rest.step == 0.0
    assert first.weight == pytest.approx(3.25)
