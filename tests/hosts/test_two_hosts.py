"""Training across two hosts: the same bits as on one, also when one of them is cut off in between."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import TwoNodes, two_nodes
from ray_jobs import SMALL, job, wait_until

from piper_owner.bench.two_hosts import two_hosts
from piper_owner.checkpoint import has_checkpoint, read_index
from piper_owner.cli import options
from piper_owner.cli.output import cache_folder
from piper_owner.data.text import read_text
from piper_owner.data.vocabulary import encode
from piper_owner.errors import ResourceError
from piper_owner.executor.config import RunKind
from piper_owner.runtime.driver import train

TIMEOUT = 5
# A rank's own wait, that for the rank at fault to say so, and 10 s for a cluster that does not answer.
LIMIT = TIMEOUT + 3 + 10 + 5
CUT = re.compile(
    r"error: step \d+ of the owner run: rank [01] failed"
    r"(?: first, at \S+ of step \d+: PeerTimeoutError|: PeerTimeoutError: \S+ of step \d+): "
    r".*rank [01] waited 5 s for rank [01], which did not answer"
)
RANKS = "ray::RankHost"


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Iterator[TwoNodes]:
    """Two nodes on two hosts, of as many CPUs as the parameter says (1), gone at the end."""
    mine = f"piper-owner-{os.getpid()}-"
    try:
        with two_nodes(cpus=getattr(request, "param", 1)) as started:
            yield started
    except ResourceError as error:
        pytest.skip(str(error))
    assert mine not in namespaces()
    assert started.workers("") == [0, 0]


def losses_on_one_host(*arguments: str) -> list[float]:
    """Of the owner run of `piper-owner train` with `arguments`."""
    wanted = options.read(options.build_parser().parse_args(["train", *arguments]))
    tokens = encode(read_text(wanted.text), wanted.config.vocab, cache_dir=cache_folder())
    result = train(wanted.config, tokens, text="text")
    return list(result.runs[RunKind.OWNER].losses)


def losses_of(file: Path, run: str = "owner") -> list[float]:
    losses: list[float] = json.loads(file.read_text(encoding="utf-8"))["runs"][run]["losses"]
    return losses


def train_and_cut(nodes: TwoNodes, folder: Path) -> int:
    """Train across both hosts, cut host 1 off, and see the command end; the last step that it kept."""
    with job(
        *(*SMALL, "--steps", "100000", "--address", nodes.address, "--timeout", str(TIMEOUT)),
        *("--checkpoint", str(folder), "--every", "20"),
        inside=nodes.inside,
        **nodes.settings,
    ) as running:
        assert wait_until(lambda: has_checkpoint(folder) and nodes.workers(f"{RANKS}.step") == [1, 1], 90)
        nodes.pair.set_link(1, up=False)
        start = time.monotonic()
        status, out, errors = running.end(2 * LIMIT)
        assert time.monotonic() - start < LIMIT
    last = errors.strip().splitlines()[-1]
    assert status == 1, errors
    assert CUT.search(last), last
    assert "Traceback" not in errors
    assert out == ""
    return read_index(folder).step


def go_on(nodes: TwoNodes, folder: Path, steps: int, result: Path) -> None:
    with job(
        *(*SMALL, "--steps", str(steps), "--address", nodes.address, "--timeout", "60"),
        *("--checkpoint", str(folder), "--resume", "--json", str(result)),
        inside=nodes.inside,
        **nodes.settings,
    ) as running:
        status, _, errors = running.end()
        assert status == 0, errors


@pytest.mark.usefixtures("ray_cluster")
def test_cut_off_host_ends_the_run_which_goes_on_to_the_losses_of_one_host(
    nodes: TwoNodes, tmp_path: Path
) -> None:
    folder, result = tmp_path / "kept", tmp_path / "result.json"
    kept = train_and_cut(nodes, folder)
    nodes.pair.set_link(1, up=True)
    assert wait_until(lambda: nodes.workers(RANKS) == [0, 0], 60), nodes.workers(RANKS)
    # The cluster is usable again, and the run loses what came after its checkpoint alone.
    go_on(nodes, folder, kept + 5, result)
    losses = losses_of(result)
    assert len(losses) == kept + 5
    assert losses == losses_on_one_host(*SMALL, "--steps", str(kept + 5))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_lost_host_comes_back_as_a_new_one(nodes: TwoNodes, tmp_path: Path) -> None:
    folder, result = tmp_path / "kept", tmp_path / "result.json"
    kept = train_and_cut(nodes, folder)
    nodes.stop(1)
    assert nodes.workers("")[1] == 0
    nodes.pair.set_link(1, up=True)
    nodes.start(1)
    go_on(nodes, folder, kept + 5, result)
    assert losses_of(result) == losses_on_one_host(*SMALL, "--steps", str(kept + 5))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [2], indirect=True)
@pytest.mark.parametrize("layout", ["rows", "dense"])
def test_demo_has_the_losses_of_one_host(nodes: TwoNodes, layout: str, tmp_path: Path) -> None:
    demo = ("--steps", "40", "--layout", layout, "--compare", "reference,naive,allreduce")
    files = [tmp_path / name for name in ("one.json", "two.json")]
    with job(*demo, "--json", str(files[0])) as running:
        status, _, errors = running.end(600)
        assert status == 0, errors
    with job(
        *demo, "--address", nodes.address, "--json", str(files[1]), inside=nodes.inside, **nodes.settings
    ) as running:
        assert wait_until(lambda: nodes.workers(f"{RANKS}.step") == [2, 2], 120), nodes.workers(RANKS)
        status, _, errors = running.end(600)
        assert status == 0, errors
    for run in RunKind:
        one, two = (losses_of(file, run.value) for file in files)
        assert len(one) == 40
        assert one == two


def test_hosts_reach_each_other_alone_and_go(tmp_path: Path) -> None:
    mine = f"piper-owner-{os.getpid()}-"
    try:
        with two_hosts(rate="1gbit") as pair:
            assert namespaces().count(mine) == 2
            routes = subprocess.run(
                [*pair.hosts[0].command, "ip", "route"], capture_output=True, text=True, timeout=60
            ).stdout
            assert routes.splitlines() == ["198.18.0.0/30 dev link0 proto kernel scope link src 198.18.0.1 "]
            pair.set_link(0, up=False)
            with pytest.raises(ResourceError, match="ip -n no-such"):
                type(pair)(hosts=pair.hosts, names=("no-such", "no-such")).set_link(0, up=True)
    except ResourceError as error:
        pytest.skip(str(error))
    assert mine not in namespaces()


def test_machine_that_cannot_make_hosts_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(ResourceError, match="network namespaces need root"), two_hosts():
            pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ResourceError, match="no 'ip' here; install iproute2"), two_hosts():
        pass
