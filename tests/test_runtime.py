"""Training on real Ray actors, and what the runtime leaves of a Ray that is not its own."""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
from ray_jobs import SMALL, job, wait_until

from piper_owner.errors import ConfigError, ResourceError
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.devices import check_gpus
from piper_owner.ownership import LayoutChoice
from piper_owner.runtime import environment
from piper_owner.runtime.actor import visible_index
from piper_owner.runtime.address import check_address
from piper_owner.runtime.cluster import Cluster, count_cpus, count_gpus
from piper_owner.runtime.driver import train
from piper_owner.runtime.progress import StepProgress
from piper_owner.runtime.signals import undisturbed

CONFIG = TrainConfig(
    stages=4,
    microbatches=4,
    microbatch_size=2,
    sequence_length=8,
    vocab=256,
    hidden=16,
    heads=2,
    layers=4,
    steps=5,
    dtype="float64",
    timeout_seconds=60,
)
TOKENS = np.random.default_rng(0).integers(0, 256, 1000).astype(np.int32)
COMPARED = (RunKind.REFERENCE, RunKind.NAIVE, RunKind.ALLREDUCE)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("layout", ["auto", "dense"])
def test_owner_trains_like_the_reference_and_naive_drifts(layout: LayoutChoice) -> None:
    seen: list[StepProgress] = []
    result = train(
        replace(CONFIG, layout=layout), TOKENS, text="numbers", compare=COMPARED, on_step=seen.append
    )
    written = result.to_json()
    assert list(written["runs"]) == ["owner", "reference", "naive", "allreduce"]
    for name in ("owner", "allreduce"):
        assert written["max_abs_loss_diff"][name] < 1e-10
        assert written["max_abs_param_diff"][name] < 1e-10
    assert written["max_abs_loss_diff"]["naive"] > 1e-4
    assert written["max_abs_param_diff"]["naive"] > 1e-4
    assert written["replicas_equal"] is True
    table = 256 * 16 * 8
    state = {
        name: [run["tied_bytes"][str(rank)]["optimizer"] for rank in range(4)]
        for name, run in written["runs"].items()
    }
    one = state["reference"][0]
    assert one >= 2 * table
    assert state["owner"] == ([one, 0, 0, 0] if layout == "dense" else [0, 0, 0, one])
    assert state["allreduce"] == [one, 0, 0, one]
    sent = written["runs"]["owner"]["bytes_sent_per_step"]
    if layout == "dense":
        assert sent["0"]["weights"] == sent["3"]["grads"] == table
    else:
        assert sent["0"]["ids"] * 16 * 8 == sent["0"]["grads"] * 4 == sent["3"]["rows"] * 4 < table * 4
    assert written["ties"][0]["owner"] == (0 if layout == "dense" else 3)
    order = [RunKind.OWNER, *COMPARED]
    assert [(p.run, p.step) for p in seen] == [(kind, i + 1) for kind in order for i in range(5)]
    losses = [p.loss for p in seen if p.run is RunKind.OWNER]
    assert losses == list(result.runs[RunKind.OWNER].losses)


@pytest.mark.usefixtures("ray_cluster")
def test_first_and_last_stage_on_one_device_need_no_message() -> None:
    result = train(replace(CONFIG, placement="v", devices=2), TOKENS, text="numbers", compare=COMPARED[:1])
    run = result.runs[RunKind.OWNER]
    assert [sent.total for sent in run.bytes_sent_per_step.values()] == [0, 0]
    assert run.tied_bytes[0].weights == 256 * 16 * 8
    assert run.tied_bytes[1].optimizer == 0
    assert result.to_json()["max_abs_param_diff"]["owner"] < 1e-10


@pytest.mark.usefixtures("ray_cluster")
def test_same_run_twice_gives_the_same_bits_and_leaves_the_users_ray_alone() -> None:
    import ray

    config = replace(CONFIG, stages=2, devices=2)
    results = [train(config, TOKENS, text="numbers") for _ in range(2)]
    first, second = (result.runs[RunKind.OWNER] for result in results)
    assert first.losses == second.losses
    for rank, weights in first.weights.items():
        for name, value in weights.items():
            assert torch.equal(value, second.weights[rank][name])
    assert ray.is_initialized()
    assert wait_until(lambda: count_cpus()[1] == 4, 10)


@pytest.mark.usefixtures("ray_cluster")
def test_too_few_cpus_are_a_resource_error_and_nothing_stays_reserved() -> None:
    with pytest.raises(ResourceError, match=r"asked the Ray cluster for 5 CPUs.* it has 4, and 4 are free"):
        train(replace(CONFIG, stages=5, devices=5, timeout_seconds=1.0), TOKENS, text="numbers")
    assert wait_until(lambda: count_cpus()[1] == 4, 10)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("num", "share", "each"), [(2, 1.0, 1), (4, 0.5, 2)])
def test_each_rank_gets_its_share_of_a_gpu(num: int, share: float, each: int) -> None:
    import ray

    if count_gpus()[0] != 2:
        pytest.skip("counts on the two GPUs that Ray is told of where there are none")

    class Probe:  # in here, so that it travels whole
        def shown(self) -> tuple[str | None, tuple[str, ...]]:
            return os.environ.get("CUDA_VISIBLE_DEVICES"), tuple(map(str, ray.get_gpu_ids()))

    with Cluster(num, timeout=timedelta(seconds=60), gpus=share) as cluster:
        probes = [cluster.start(Probe, index) for index in range(num)]
        shown: list[tuple[str | None, tuple[str, ...]]] = ray.get(
            [probe.shown.remote() for probe in probes], timeout=60
        )
    assert sorted(ids for _, ids in shown) == sorted([("0",), ("1",)] * each)
    assert all(visible == ids[0] and visible_index(ids, visible) == 0 for visible, ids in shown)
    assert wait_until(lambda: count_gpus()[1] == 2, 10)


@pytest.mark.usefixtures("ray_cluster")
def test_too_few_gpus_are_an_error_before_anything_is_reserved() -> None:
    config = replace(CONFIG, device="cuda", steps=1, dp=8)
    with pytest.raises(
        ConfigError, match=r"32 ranks need 32 GPUs \(one .*\), and the Ray cluster has \d GPU"
    ):
        train(config, TOKENS, text="numbers")
    assert wait_until(lambda: count_cpus()[1] == 4, 10)


@pytest.mark.parametrize(
    ("ranks", "share", "needed"),
    [(1, 1.0, 1), (8, 1.0, 8), (4, 0.5, 2), (5, 0.5, 3), (3, 0.4, 2), (4, 0.6, 4), (10, 0.1, 1), (4, 0.0, 0)],
)
def test_ranks_share_gpus_whole(ranks: int, share: float, needed: int) -> None:
    check_gpus(ranks, share, available=needed, where="it")
    if needed:
        with pytest.raises(ConfigError, match=f"needs? {needed} GPU"):
            check_gpus(ranks, share, available=needed - 1, where="it")


@pytest.mark.parametrize(
    ("given", "visible", "index"),
    [
        (("3",), "3", 0),
        (("3",), "2, 3", 1),
        (("3",), None, 3),
        (("3",), "", 3),
        (("GPU-ab",), "GPU-cd,GPU-ab", 1),
        (("GPU-ab",), None, 0),
        (("5",), "GPU-cd", 0),
        ((), "0", 0),
    ],
)
def test_the_gpu_of_an_actor_by_the_number_that_torch_gives_it(
    given: tuple[str, ...], visible: str | None, index: int
) -> None:
    assert visible_index(given, visible) == index


@pytest.mark.usefixtures("ray_cluster")
def test_closing_twice_is_fine() -> None:
    import ray

    cluster = Cluster(2, timeout=timedelta(seconds=30))
    cluster.close()
    cluster.close()
    assert ray.is_initialized()
    with pytest.raises(RuntimeError, match="closed"):
        cluster.start(object, 0)


def cluster_settings() -> tuple[str, dict[str, str]]:
    """The address of the session's Ray, and what lets another process in."""
    import ray

    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    return ray.get_runtime_context().gcs_address, {n: os.environ[n] for n in names if n in os.environ}


@pytest.mark.usefixtures("ray_cluster")
def test_command_joins_a_running_cluster_and_leaves_it() -> None:
    address, variables = cluster_settings()
    with job(*SMALL, "--steps", "2", "--address", address, **variables) as running:
        status, out, errors = running.end()
        assert status == 0, errors
        assert "owns it" in out
        assert not any("raylet" in title for title in running.processes().values())
    assert wait_until(lambda: count_cpus()[1] == 4, 20)


@pytest.mark.usefixtures("ray_cluster")
def test_command_that_asks_for_too_much_is_bad_input() -> None:
    address, variables = cluster_settings()
    wide = ("--stages", "5", "--layers", "3", "--timeout", "2", "--address", address)
    with job(*SMALL, *wide, **variables) as running:
        status, out, errors = running.end()
    assert status == 2
    assert "asked the Ray cluster for 5 CPUs" in errors
    assert "it has 4, and 4 are free" in errors
    assert out == ""


@pytest.mark.parametrize(
    "address", ["nonsense", "host:port", ":6379", "ray://127.0.0.1:10001", "127.0.0.1:99999"]
)
def test_address_that_is_none(address: str) -> None:
    with pytest.raises(ConfigError, match=f"--address {address}: "):
        check_address(address)


def test_address_where_nobody_listens_is_found_at_once() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        with pytest.raises(ConfigError, match="nobody answers there"):
            check_address(f"127.0.0.1:{bound.getsockname()[1]}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_wait_until_the_end(number: signal.Signals) -> None:
    got: list[int] = []
    before = signal.signal(number, lambda n, _: got.append(n))
    try:
        with undisturbed():
            signal.raise_signal(number)
            signal.raise_signal(number)
            assert got == []
            if number is signal.SIGTERM:
                signal.signal(number, signal.SIG_IGN)  # as Ray does with a handler of its own
        assert got == [number]
        signal.raise_signal(number)
        assert got == [number, number]
    finally:
        signal.signal(number, before)


def test_interrupt_held_back_is_raised_even_after_an_error() -> None:
    def fail() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("inside")

    with pytest.raises(KeyboardInterrupt):
        fail()


def test_environment_is_private_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", {name: m for name, m in sys.modules.items() if name != "ray"})
    monkeypatch.setattr(os, "environ", {})
    environment.prepare("10.0.0.1:6379")
    assert not any(name.startswith("RAY_AUTH") for name in os.environ)
    environment.prepare(None)
    token = os.environ["RAY_AUTH_TOKEN"]
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert len(token) == 64
    environment.prepare(None)
    assert os.environ["RAY_AUTH_TOKEN"] == token
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "1"})
    environment.prepare(None)
    assert "RAY_AUTH_TOKEN" not in os.environ
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "1"


def test_environment_stays_where_ray_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", {**sys.modules, "ray": None})
    monkeypatch.setattr(os, "environ", {})
    environment.prepare(None)
    assert os.environ == {}
