#!/usr/bin/env python3
"""Time the tied sync and step of one table between two processes on this machine.

In one run, in turn: two copies whose gradients are all-reduced, each stepped by its own optimizer,
against one owner that receives the gradient, steps, and sends the weights back, for several chunk
sizes. Every figure is the median of the rounds; one is the time until both ranks are done.

    scripts/bench_step.py                        the 32,000 x 512 float32 table, fused AdamW
    scripts/bench_step.py --rows 50257 --columns 768 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import TCPStore

from piper_owner.dag.nodes import Sync, SyncKind
from piper_owner.exchange import Exchange
from piper_owner.ownership import Holder, Tie, TiePlan, Use
from piper_owner.stepping import ParameterStepper
from piper_owner.tied import TiedParameter
from piper_owner.transport import GlooFabric, Group, Line

TIE = "table"
TIMEOUT = timedelta(seconds=60)
OWNER = (
    Sync(kind=SyncKind.RECV_GRAD, bucket=TIE, peer=1),
    Sync(kind=SyncKind.OWNER_STEP, bucket=TIE),
    Sync(kind=SyncKind.SEND_WEIGHT, bucket=TIE, peer=1),
)
REPLICA = (
    Sync(kind=SyncKind.SEND_GRAD, bucket=TIE, peer=0),
    Sync(kind=SyncKind.RECV_WEIGHT, bucket=TIE, peer=0),
)


def main() -> int:
    """Run the benchmark on two processes and print its table."""
    options = parse_options()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    ranks = [
        context.Process(target=run_rank, args=(rank, store.port, options, answers), daemon=True)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        print("a rank failed; its error stands above", file=sys.stderr)
        return 1
    show(options, answers.get())
    return 0


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=32_000, help="rows of the table (%(default)s)")
    parser.add_argument("--columns", type=int, default=512, help="columns of the table (%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of each way (%(default)s)")
    parser.add_argument("--chunk-mib", default="0.5,1,2,4,8,16", help="chunk sizes, in MiB (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if not 1 <= options.rounds <= 60:
        parser.error("--rounds: 1 to 60 (the reduced gradient doubles in every round)")
    return options


def run_rank(rank: int, port: int, options: argparse.Namespace, answers: object) -> None:
    """Time every way, round by round, on one of the two ranks; rank 0 puts the medians."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    ways: dict[str, Callable[[], None]] = {}
    fabrics = []
    for name in ("all-reduce", *options.chunk_mib.split(",")):
        fabric = GlooFabric(PrefixStore(name, store), rank, 2, timeout=TIMEOUT, hostname="127.0.0.1")
        fabrics.append(fabric)
        ways[name] = all_reduce(fabric, options) if name == "all-reduce" else owner(fabric, options, name)
    group = fabrics[0].group((0, 1), "clock")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(options.rounds + 2):
        for name, way in ways.items():
            elapsed = timed(way, group)
            if round_number >= 2:  # the first two warm up: optimizer state, sockets, staging
                seconds[name].append(elapsed)
    if rank == 0:
        answers.put({name: statistics.median(times) for name, times in seconds.items()})  # type: ignore[attr-defined]


def timed(way: Callable[[], None], group: Group) -> float:
    """Seconds from a common start until both ranks are done."""
    mark = torch.zeros(1)
    group.all_reduce(mark)
    start = time.perf_counter()
    way()
    group.all_reduce(mark)
    return time.perf_counter() - start


def table(options: argparse.Namespace) -> tuple[nn.Parameter, torch.Tensor]:
    """A table and a gradient for it, so small that it can double in every round."""
    shape = (options.rows, options.columns)
    generator = torch.Generator().manual_seed(0)
    weights, grad = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    return nn.Parameter(weights), grad * 1e-6


def all_reduce(fabric: GlooFabric, options: argparse.Namespace) -> Callable[[], None]:
    """Two copies: reduce the gradient over both ranks, step on both."""
    parameter, grad = table(options)
    group = fabric.group((0, 1), "all-reduce")
    optimizer = torch.optim.AdamW([parameter], fused=True)

    def way() -> None:
        group.all_reduce(grad)
        parameter.grad = grad
        optimizer.step()

    return way


def owner(fabric: GlooFabric, options: argparse.Namespace, chunk_mib: str) -> Callable[[], None]:
    """One owner, rank 0, and a dense replica on rank 1."""
    parameter, grad = table(options)
    line = Line(fabric.channel(1 - fabric.rank, "tied"), chunk_bytes=int(float(chunk_mib) * 2**20))
    plan = TiePlan(
        tie=Tie((TIE,)),
        shape=tuple(parameter.shape),
        dtype="float32",
        requires_grad=True,
        owner=0,
        holders=tuple(Holder(rank=r, stages=(r,), names=(TIE,), use=Use.DENSE) for r in range(2)),
    )
    stepper = None
    if fabric.rank == 0:
        stepper = ParameterStepper(torch.optim.AdamW([parameter], fused=True), parameter)
    exchange = Exchange(
        fabric.rank,
        {TIE: TiedParameter(plan=plan, parameter=parameter, stepper=stepper)},
        {1 - fabric.rank: line},
    )
    step = 0

    def way() -> None:
        nonlocal step
        parameter.grad = grad
        for node in OWNER if fabric.rank == 0 else REPLICA:
            exchange.run(node, step)
        exchange.flush()
        step += 1

    return way


def show(options: argparse.Namespace, medians: dict[str, float]) -> None:
    """Print the table of medians and ratios; write the JSON file if asked."""
    base = medians["all-reduce"]
    size = options.rows * options.columns * 4
    print(
        f"{options.rows:,} x {options.columns} float32, {size / 1e6:.1f} MB, fused AdamW, "
        f"median of {options.rounds} rounds"
    )
    print(f"{'way':<26}{'sync + step':>14}{'against all-reduce':>22}")
    for name, seconds in medians.items():
        label = name if name == "all-reduce" else f"owner, {name} MiB chunks"
        print(f"{label:<26}{seconds * 1e3:>11.1f} ms{seconds / base:>21.2f}x")
    best = min((name for name in medians if name != "all-reduce"), key=medians.__getitem__)
    print(f"best chunk size here: {best} MiB, {medians[best] / base:.2f}x the time of all-reduce")
    if options.json is not None:
        figures = {
            "table": [options.rows, options.columns],
            "rounds": options.rounds,
            "seconds": medians,
            "best_chunk_mib": float(best),
            "ratio": medians[best] / base,
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
