"""The path between two devices: chosen alike by both, opened in one order, and the payloads that take it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from owners import errors
from ranks import RankPool
from staged import staged
from test_staging import DENSE, TIMEOUT, _dense, _name, _rows, _syncs, assert_same_bits, device_ranks
from tiny import one_torch_thread
from torch._C._distributed_c10d import Store

from piper_owner.errors import ConfigError, ExchangeError, MessageMismatchError, PeerTimeoutError
from piper_owner.executor.local import run_threads
from piper_owner.streams import StreamOrderError
from piper_owner.transport import (
    Channel,
    Fabric,
    FabricView,
    GlooFabric,
    Group,
    Header,
    Line,
    MemoryNetwork,
    Phase,
    paths,
)
from piper_owner.transport.messages import DirectLine
from piper_owner.transport.nccl import NcclFabric
from piper_owner.transport.paths import LineOpener, Path, Place, path_between, place_of

T = TypeVar("T")

CPU = torch.device("cpu")
SHORT = timedelta(seconds=0.5)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


# -- which path

HOST = Place()
OTHER = Place(kind="xpu")
SEVERAL = Place(kind="several")
GPU_A = Place(kind="cuda", uuid="a", has_nccl=True)
GPU_B = Place(kind="cuda", uuid="b", has_nccl=True)
PLACES = [HOST, OTHER, SEVERAL, GPU_A, GPU_B, Place(kind="cuda", uuid="c"), Place(kind="cuda", has_nccl=True)]


def test_only_two_gpus_that_are_not_one_and_have_nccl_take_it() -> None:
    found = {
        (i, j): path_between(one, two)
        for (i, one), (j, two) in itertools.product(enumerate(PLACES), repeat=2)
    }
    assert {pair for pair, path in found.items() if path is Path.NCCL} == {(3, 4), (4, 3)}
    assert {pair for pair, path in found.items() if path is Path.HOST} == {(0, 0)}
    assert all(found[i, j] is found[j, i] for i, j in found), "both ends choose alike"


def test_a_place_survives_json_and_is_that_of_all_parameters() -> None:
    for place in PLACES:
        assert Place.from_json(place.to_json()) == place
    meta = torch.device("meta")
    assert place_of([]) == place_of([meta]) == (HOST, CPU)
    assert place_of([CPU, meta, CPU]) == (HOST, CPU)
    assert place_of([CPU, torch.device("xpu", 0)]) == (SEVERAL, None)
    assert place_of([torch.device("xpu", 1)]) == (OTHER, torch.device("xpu", 1))


class _Opening(Fabric):
    """Notes what is opened."""

    def __init__(self, inner: Fabric, opened: list[tuple[int, str]]) -> None:
        self.rank, self.world_size, self.timeout = inner.rank, inner.world_size, inner.timeout
        self.board = inner.board
        self._inner, self.opened = inner, opened

    def channel(self, peer: int, purpose: str) -> Channel:
        self.opened.append((peer, purpose))
        return self._inner.channel(peer, purpose)

    def group(self, ranks: tuple[int, ...], purpose: str) -> Any:  # noqa: ANN401 - not opened here
        raise AssertionError

    def over_devices(self, device: torch.device) -> Fabric:
        return self


def test_communicators_are_opened_in_one_order_of_pairs_each_behind_its_own_channel() -> None:
    pairs = [(0, 1), (0, 3), (1, 2), (1, 3), (2, 3)]
    places = [Place(kind="cuda", uuid=uuid, has_nccl=True) for uuid in "abca"]
    network = MemoryNetwork(4, timeout=TIMEOUT)
    for rank in range(4):
        fabric = _Opening(network.fabric(rank), [])
        opener = LineOpener(fabric, chunk_bytes=64)
        opener.describe([torch.nn.Linear(1, 1)])
        opener.learn(place.to_json() for place in places)
        lines = opener.open(pairs, "tied")
        expected: list[tuple[int, str]] = []
        for pair in pairs:
            if rank in pair:
                peer = sum(pair) - rank
                expected.append((peer, "tied"))
                if pair != (0, 3):  # two ranks of one GPU
                    expected.append((peer, "tied payload"))
        assert fabric.opened == expected
        assert {peer for peer, line in lines.items() if line.direct is None} == {3 - rank} & {0, 3}
        plain = LineOpener(_Opening(network.fabric(rank), []), chunk_bytes=64).open(pairs, "tied")
        assert all(line.direct is None for line in plain.values())


def test_a_fabric_without_such_a_path_says_so() -> None:
    network = MemoryNetwork(2, timeout=TIMEOUT)
    for fabric in (network.fabric(0), FabricView(network.fabric(0), (0,))):
        with pytest.raises(ConfigError, match="has no path between accelerators, here cuda:0"):
            fabric.over_devices(torch.device("cuda", 0))


# -- payloads beside the headers


@pytest.fixture
def _direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every two ranks of this process have a path between their devices."""
    monkeypatch.setattr(paths, "path_between", lambda one, two: Path.NCCL)


class _Split(_Opening):
    """Payloads over a second channel of the same transport."""

    def group(self, ranks: tuple[int, ...], purpose: str) -> Group:
        return self._inner.group(ranks, purpose)


def _split(fabric: Fabric, work: Callable[..., T], /, **options: Any) -> T:  # noqa: ANN401
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "path_between", lambda one, two: Path.NCCL)
        return work(_Split(fabric, []), **options)


@pytest.mark.parametrize(("world", "options"), DENSE, ids=_name)
def test_dense_steps_have_the_same_bits(
    world: int, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    host = run_threads(world, partial(_dense, **options), timeout=TIMEOUT)
    request.getfixturevalue("_direct")
    assert_same_bits(device_ranks(world, _dense, **options), host)


def test_rows_have_the_same_bits_and_the_host_waits_for_no_value(request: pytest.FixtureRequest) -> None:
    host = run_threads(2, partial(_rows, next_step=True), timeout=TIMEOUT)
    request.getfixturevalue("_direct")
    assert_same_bits(device_ranks(2, _rows, next_step=True), host)
    for way in ("streamed", "early", "finalized"):
        assert run_threads(2, partial(_syncs, way=way), timeout=TIMEOUT) == [[], []]


def test_headers_and_payloads_over_two_channels_of_gloo(rank_pool: RankPool) -> None:
    cases: list[tuple[Callable[..., list[torch.Tensor]], dict[str, Any]]] = [
        (_dense, {}),
        (_dense, {"way": "early"}),
        (_rows, {"next_step": True}),
    ]
    for work, options in cases:
        host = run_threads(2, partial(work, **options), timeout=TIMEOUT)
        assert_same_bits(rank_pool.run(2, _split, work, **options), host)


@pytest.mark.usefixtures("_direct")
@pytest.mark.parametrize("way", ["streamed", "early"])
def test_a_payload_that_is_not_waited_for_is_found(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Line.wait

    def wait(line: Line, work: Any) -> None:  # noqa: ANN401
        if not type(work).__name__.startswith("_Direct"):
            inner(line, work)

    monkeypatch.setattr(Line, "wait", wait)
    with pytest.raises(StreamOrderError, match="receive from"):
        device_ranks(2, _dense, way=way)


def _announced(fabric: Fabric) -> None:
    """Rank 0 has a path to the device of rank 1, which knows nothing of it."""
    with staged(fabric) as (there, _):
        channel = there.channel(1 - fabric.rank, "tied")
        header = Header(phase=Phase.GRAD, subject="w", step=3, dtype=torch.float32, shape=(4,))
        if fabric.rank == 0:
            direct = DirectLine(there.over_devices(CPU).channel(1, "payload"), CPU)
            line = Line(channel, chunk_bytes=64, direct=direct)
            line.send(header, torch.ones(4))
            line.flush()
        else:
            Line(channel, chunk_bytes=64).receive(header)


def test_a_payload_by_a_path_that_is_not_there_is_refused() -> None:
    zero, one = errors(2, _announced)
    assert isinstance(zero, ExchangeError)
    assert isinstance(one, MessageMismatchError)
    assert "gradient of 'w' from rank 0 to rank 1, step 3: its payload was to come" in str(one)


# -- NCCL's channel, over communicators of gloo


class _Done:
    """A work of gloo, which cannot be asked whether it is done, as NCCL's can."""

    def __init__(self, inner: Any, *, is_instant: bool) -> None:  # noqa: ANN401
        self._inner, self._is_done = inner, is_instant

    def is_completed(self) -> bool:
        return self._is_done

    def wait(self) -> bool:
        self._inner.wait()
        self._is_done = True
        return True


class _Pair:
    """A communicator that only ever sends one way, or receives."""

    made: list[str] = []  # noqa: RUF012 - of this process

    def __init__(self, store: Store, rank: int, timeout: timedelta) -> None:
        kind: Any = dist.ProcessGroupGloo
        options = kind._Options()
        options._timeout, options._devices = timeout, [kind.create_device(hostname="127.0.0.1")]
        self._group: Any = kind(store, rank, 2, options)
        self.used: set[str] = set()
        self.is_aborted = False

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:  # noqa: ANN401
        self.used.add("send")
        return _Done(self._group.send(tensors, peer, tag), is_instant=False)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:  # noqa: ANN401
        self.used.add("recv")
        return _Done(self._group.recv(tensors, peer, tag), is_instant=False)

    def abort(self) -> None:
        self.is_aborted = True
        self._group = None


def _two_communicators(fabric: Fabric) -> list[Any]:
    assert isinstance(fabric, GlooFabric)
    made: list[_Pair] = []

    def make(store: Store, rank: int, timeout: timedelta) -> _Pair:
        made.append(_Pair(store, rank, timeout))
        return made[-1]

    there = NcclFabric(fabric, fabric._store, CPU, make=make)
    channel = there.channel(1 - fabric.rank, "tied payload")
    first = [sorted(each.used) for each in made]  # used before the first step
    got = [torch.zeros(5) for _ in range(3)]
    works = [channel.post_send(torch.full((5,), 10.0 * fabric.rank + i)) for i in range(3)]
    works += [channel.post_recv(each) for each in got]
    for work in works:
        work.wait()
        work.wait()
    channel.drain()
    channel.close()
    channel.close()
    try:
        channel.post_send(got[0])
    except ConnectionError as error:
        first.append([str(error)])
    return [first, [float(each[4]) for each in got], [each.is_aborted for each in made]]


def test_a_pair_has_a_communicator_for_each_direction_made_before_the_first_step(
    rank_pool: RankPool,
) -> None:
    zero, one = rank_pool.run(2, _two_communicators)
    assert zero[0][:2] == [["send"], ["recv"]]
    assert one[0][:2] == [["recv"], ["send"]]
    assert "this end of the channel is closed" in zero[0][2][0]
    assert zero[1:] == [[10.0, 11.0, 12.0], [True, True]]
    assert one[1:] == [[0.0, 1.0, 2.0], [True, True]]


def _overdue(fabric: Fabric) -> str:
    assert isinstance(fabric, GlooFabric)
    there = NcclFabric(fabric, fabric._store, CPU, make=_Pair)
    channel = there.channel(1 - fabric.rank, "tied payload")
    there.timeout = channel.timeout = SHORT
    if fabric.rank == 1:
        fabric.channel(0, "end").post_recv(torch.zeros(1)).wait()
        return ""
    channel.post_recv(torch.zeros(3))
    try:
        channel.drain()
    except PeerTimeoutError as error:
        fabric.channel(1, "end").post_send(torch.zeros(1)).wait()
        return str(error)
    return "it is done"


def test_a_payload_that_does_not_come_is_named_after_the_timeout(rank_pool: RankPool) -> None:
    found = rank_pool.run(2, _overdue)
    assert "rank 0 waited 0.5 s for rank 1" in found[0]


@pytest.mark.gpu
def test_nccl_between_two_gpus(rank_pool: RankPool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL has no communicator between two ranks of one")
    assert rank_pool.run(2, _over_nccl) == [[1.0, 1.0], [0.0, 0.0]]


def _over_nccl(fabric: Fabric) -> list[float]:
    device = torch.device("cuda", fabric.rank)
    torch.cuda.set_device(device)
    channel = fabric.over_devices(device).channel(1 - fabric.rank, "tied payload")
    got = torch.zeros(1000, device=device)
    mine = torch.full((1000,), float(fabric.rank), device=device)
    works = [channel.post_send(mine), channel.post_recv(got)]
    for work in works:
        work.wait()
    found = [float(got[0]), float(got[-1])]
    channel.drain()
    channel.close()
    return found
