"""Plans large clusters from stated link figures: what the sync of a tie costs on 8 GPUs and on 1,024.

python scripts/scale_table.py               print the tables
python scripts/scale_table.py --write       put them into docs/scale.md
python scripts/scale_table.py --json FILE   all figures of every plan, as JSON; - for standard output

Nothing is measured here: each figure is that of `piper_owner.planning`, which plays the programs of all
ranks of a pipeline. Needs neither torch nor Ray.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from piper_owner.planning.balance import layer_counts
from piper_owner.planning.compare import Comparison, MethodPlan, compare_methods
from piper_owner.planning.config import Method, PlanConfig, Transfer
from piper_owner.planning.shapes import Architecture, ModelShapes, count, layer_shapes, split_architecture
from piper_owner.planning.zipf import expected_rows
from piper_owner.schedules import Schedule

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "scale.md"
BEGIN: Final = "<!-- tables: begin -->\n"
END: Final = "<!-- tables: end -->\n"
VOCABULARIES: Final = (32_000, 50_257, 128_256, 256_000)
MICROBATCH: Final = 4_096
"""Tokens of a microbatch, and of a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A kind of machine: `gpus` in all, cut into pipelines of each of `depths` GPUs.

    bandwidth: bytes a second that a GPU sends to another, each way. latency: seconds of a message beside.
    microbatches: of a pipeline, for each of its stages.
    """

    title: str
    gpus: int
    depths: tuple[int, ...]
    hidden: int
    layers: int
    bandwidth: float
    latency: float
    microbatches: int = 4


NODE: Final = Cluster(
    title="A node of 8 GPUs",
    gpus=8,
    depths=(2, 4, 8),
    hidden=2_048,
    layers=24,
    bandwidth=0.8 * 450e9,
    latency=5e-6,
)
FABRIC: Final = Cluster(
    title="1,024 GPUs, 400 Gbit/s each",
    gpus=1_024,
    depths=(4, 8, 16, 32),
    hidden=4_096,
    layers=64,
    bandwidth=0.8 * 50e9,
    latency=1e-5,
)
ETHERNET: Final = Cluster(
    title="1,024 GPUs, 100 Gbit/s each",
    gpus=1_024,
    depths=(4, 8, 16, 32),
    hidden=4_096,
    layers=64,
    bandwidth=0.8 * 12.5e9,
    latency=3e-5,
)
CLUSTERS: Final = (NODE, FABRIC, ETHERNET)
FLOPS: Final = 0.4 * 989e12
MEMORY_BANDWIDTH: Final = 0.8 * 3.35e12


def shapes(cluster: Cluster, vocab: int, depth: int) -> ModelShapes:
    """A decoder as Llama's, its layers spread so that the last stage has room for the head."""
    heads = cluster.hidden // 128
    model = Architecture(
        vocab=vocab,
        hidden=cluster.hidden,
        layers=cluster.layers,
        ffn=4 * cluster.hidden,
        heads=heads,
        kv_heads=max(heads // 4, 1),
        head_dim=128,
    )
    layer = count(layer_shapes(model))
    counts = layer_counts([layer] * cluster.layers, depth, head=vocab * cluster.hidden)
    return split_architecture(model, counts, name=f"vocabulary {vocab:,}, {depth} stages")


def planned(cluster: Cluster, vocab: int, depth: int, transfer: Transfer) -> Comparison:
    """All ways to keep the tie one, on one pipeline of `depth` GPUs beside as many others as fit."""
    microbatches = cluster.microbatches * depth
    config = PlanConfig(
        stages=depth,
        schedule=Schedule.ONE_F_ONE_B,
        microbatches=microbatches,
        pipelines=cluster.gpus // depth,
        tokens=microbatches * MICROBATCH,
        sequence=MICROBATCH,
        num_rows=expected_rows(microbatches * MICROBATCH, vocab),
        bandwidth=cluster.bandwidth,
        latency=cluster.latency,
        flops=FLOPS,
        memory_bandwidth=MEMORY_BANDWIDTH,
        transfer=transfer,
    )
    return compare_methods(shapes(cluster, vocab, depth), config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One vocabulary on one depth of pipeline, by when a dense gradient leaves."""

    vocab: int
    depth: int
    early: Comparison
    streamed: Comparison


def case(cluster: Cluster, vocab: int, depth: int) -> Case:
    """`planned` with either transfer."""
    return Case(
        vocab=vocab,
        depth=depth,
        early=planned(cluster, vocab, depth, Transfer.EARLY),
        streamed=planned(cluster, vocab, depth, Transfer.STREAMED),
    )


def cases(cluster: Cluster) -> Iterator[Case]:
    """Every vocabulary and depth of `cluster`."""
    return (case(cluster, vocab, depth) for vocab in VOCABULARIES for depth in cluster.depths)


def row(found: Case) -> list[str]:
    """A line of the table: by how much each way's step is longer, and what it sends and keeps."""
    step = found.early.plans[Method.NAIVE].timing.step_seconds

    def longer(plan: MethodPlan) -> str:
        seconds = plan.timing.step_seconds - step
        return "0" if abs(seconds) < 5e-6 else f"{seconds * 1e3:+.2f} ({seconds / step:+.1%})"

    reduced, dense, rows = (found.early.plans[m] for m in (Method.ALL_REDUCE, Method.DENSE, Method.ROWS))
    twice, once = (
        sum(memory.optimizer + memory.masters for memory in plan.memory.values()) for plan in (reduced, rows)
    )
    return [
        f"{found.vocab:,}",
        f"{found.depth} x {found.early.config.pipelines}",
        f"{step * 1e3:,.0f}",
        longer(reduced),
        longer(found.streamed.plans[Method.DENSE]),
        longer(dense),
        longer(rows),
        f"{reduced.busiest / 1e6:,.0f}",
        f"{rows.busiest / 1e6:,.0f}",
        f"{(twice - once) / 1e9:.2f}",
    ]


HEADINGS: Final = (
    "vocabulary",
    "stages x pipelines",
    "step, ms",
    "all-reduce, ms",
    "dense streamed, ms",
    "dense early, ms",
    "rows, ms",
    "sent, MB",
    "sent by rows, MB",
    "saved, GB",
)


def table(rows: Iterable[list[str]]) -> str:
    """Rows under HEADINGS, as Markdown."""
    lines = [HEADINGS, ("---:",) * len(HEADINGS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def text() -> str:
    """The tables of all clusters, as Markdown."""
    parts = (f"### {each.title}\n\n{table(map(row, cases(each)))}" for each in CLUSTERS)
    return "\n" + "\n".join(parts) + "\n"


def figures() -> list[dict[str, Any]]:
    """Everything that is known of every plan; JSON-ready."""
    return [
        {
            "cluster": each.title,
            "vocab": found.vocab,
            "stages": found.depth,
            "pipelines": plans.config.pipelines,
            "num_rows": plans.config.num_rows,
            "transfer": plans.config.transfer.value,
            "methods": {method.value: plan.to_dict() for method, plan in plans.plans.items()},
            "advice": plans.advice.value,
        }
        for each in CLUSTERS
        for found in cases(each)
        for plans in (found.early, found.streamed)
    ]


def rewritten(page: str) -> str:
    """`page` with the tables between its two marks replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"error: {PAGE.name} lacks the line {(END if begin else BEGIN).strip()}")
    return before + begin + text() + end + after


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scale.md")
    parser.add_argument("--json", metavar="FILE", help="write all figures; - for standard output")
    options = parser.parse_args()
    if options.json:
        out = json.dumps(figures(), indent=1) + "\n"
        if options.json == "-":
            sys.stdout.write(out)
        else:
            Path(options.json).write_text(out, encoding="utf-8")
    if options.write:
        PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    if not options.json and not options.write:
        print(text())


if __name__ == "__main__":
    main()
