"""Stages and what arrives at them are put on a rank's device; the meta device stands in for another one."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from piper_owner.dag.nodes import Transfer, TransferKind
from piper_owner.executor.config import TrainConfig
from piper_owner.executor.devices import rank_device
from piper_owner.executor.local import run_threads
from piper_owner.executor.pipeline import Mailbox
from piper_owner.executor.ports import chain_ports
from piper_owner.executor.source import GPTSource
from piper_owner.transport import Fabric, Line

META = torch.device("meta")
CONFIG = TrainConfig(stages=2, layers=2, hidden=8, heads=2, vocab=256, sequence_length=4)


@pytest.mark.parametrize("device", [torch.device("cpu"), META])
def test_what_arrives_from_another_rank_is_put_on_the_device(device: torch.device) -> None:
    def work(fabric: Fabric) -> torch.device:
        line = Line(fabric.channel(1 - fabric.rank, "pipeline"), chunk_bytes=2**20)
        mailbox = Mailbox({1 - fabric.rank: line}, chain_ports(2), device)
        if fabric.rank == 0:
            mailbox.put_outputs(0, 0, [torch.ones(2, 3)])
            kind, stage = TransferKind.SEND_ACTIVATION, 0
        else:
            kind, stage = TransferKind.RECV_ACTIVATION, 1
        node = Transfer(kind=kind, stage=stage, microbatch=0, peer=1 - fabric.rank, peer_stage=1 - stage)
        mailbox.run(node, 0)
        mailbox.flush()
        return device if fabric.rank == 0 else mailbox.take_inputs(1, 0, [])[0].device

    assert run_threads(2, work, timeout=timedelta(seconds=10)) == [device, device]


def test_stages_are_built_on_the_device_with_the_values_that_they_have_on_the_cpu() -> None:
    (stage,) = GPTSource().build_stages(CONFIG, (1,), device="meta").values()
    assert {parameter.device for parameter in stage.parameters()} == {META}
    here = GPTSource().build_stages(CONFIG, (1,))[1]
    assert {parameter.device.type for parameter in here.parameters()} == {"cpu"}
    assert [name for name, _ in here.named_parameters()] == [name for name, _ in stage.named_parameters()]


def test_a_rank_is_on_the_first_gpu_that_it_sees() -> None:
    assert rank_device(CONFIG) == torch.device("cpu")
    assert rank_device(replace(CONFIG, device="cuda")) == torch.device("cuda", 0)
