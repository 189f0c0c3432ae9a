"""`piper-owner plan`: what a tied model costs on a layout of devices. It needs no torch for a preset."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from piper_owner.cli.output import cache_folder, write_json, write_text
from piper_owner.cli.plan_options import PlanOptions
from piper_owner.cli.units import format_bytes, format_seconds
from piper_owner.directives.emit import emit_program, format_program
from piper_owner.errors import ConfigError, RunError
from piper_owner.ownership import Layout, TiePlan
from piper_owner.planning.balance import layer_counts, split_layers
from piper_owner.planning.compare import Comparison, MethodPlan, compare_methods
from piper_owner.planning.config import Method, PlanConfig
from piper_owner.planning.memory import KINDS
from piper_owner.planning.presets import find_preset
from piper_owner.planning.result import LEGEND, busy_shares, timeline_rows, to_json
from piper_owner.planning.shapes import (
    ModelShapes,
    count,
    gpt_architecture,
    layer_shapes,
    split_architecture,
)
from piper_owner.planning.zipf import ZIPF_EXPONENT, expected_rows
from piper_owner.schedules import Placement
from piper_owner.tracing.chrome import format_trace
from piper_owner.tracing.events import trace_of

__all__ = ["plan", "print_comparison", "run"]

_MOST_RANKS = 8
_CHART = 66
_TEXT_STEPS = 4
_SHORT = {"gradients": "grads", "optimizer": "optim.", "activations": "activ."}


def run(options: PlanOptions) -> int:
    """Plan as asked, print the tables to stdout, and return the exit status.

    Raises InputError for what cannot be planned, RunError for a file that cannot be written.
    """
    comparison, rows_from = plan(options)
    print_comparison(comparison, rows_from, Console(file=sys.stdout, highlight=False))
    if options.json is not None:
        with _writing("--json", options.json):
            write_json(options.json, to_json(comparison, rows_from=rows_from))
    if options.emit_directives is not None:
        dag = comparison.plans[comparison.advice].dag
        program = format_program(emit_program(dag, num_pipelines=options.config.pipelines))
        with _writing("--emit-directives", options.emit_directives):
            options.emit_directives.write_text(program, encoding="ascii")
    if options.trace is not None:
        advised = comparison.plans[comparison.advice]
        title = f"piper-owner plan: {comparison.model.name}, {comparison.advice.value}"
        trace = trace_of(advised.timing.timeline, title=title, num_steps=advised.timing.num_steps)
        with _writing("--trace", options.trace):
            write_text(options.trace, format_trace(trace))
    return 0


@contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"{option} {path}: cannot write it: {error.strerror or error}") from error


def plan(options: PlanOptions) -> tuple[Comparison, str]:
    """The comparison that was asked for, and where its number of rows comes from."""
    model = _model(options)
    num_rows, rows_from = _rows(options, model)
    config = dataclasses.replace(_suited(options, model), num_rows=num_rows)
    return compare_methods(model, config, owner=options.owner), rows_from


def _model(options: PlanOptions) -> ModelShapes:
    stages = options.config.stages
    if options.preset is not None:
        model = find_preset(options.preset).model
        layer, head = count(layer_shapes(model)), model.vocab * model.hidden
        counts = layer_counts([layer] * model.layers, stages, head=head)
        return split_architecture(model, counts, name=options.preset.lower())
    if options.model == "gpt":
        sizes = options.sizes
        heads = sizes["heads"] or (4 if sizes["hidden"] % 4 == 0 else 1)
        model = gpt_architecture(
            vocab=sizes["vocab"],
            hidden=sizes["hidden"],
            layers=sizes["layers"],
            heads=heads,
            context=options.config.sequence,
        )
        ranges = split_layers(model.layers, stages)
        return split_architecture(model, [len(held) for held in ranges], name="gpt")
    from piper_owner.cli import plan_model  # torch comes with it

    if options.is_annotated:
        return plan_model.measure_annotated(options.model, options.config, vocab=options.sizes["vocab"])
    return plan_model.measure_hugging_face(options.model, stages)


def _suited(options: PlanOptions, model: ModelShapes) -> PlanConfig:
    """The config with the stages of the model, where those are its own."""
    config, found = options.config, len(model.stages)
    if found == config.stages:
        return config
    if options.stages_given:
        raise ConfigError(
            f"--stages {config.stages}: {model.name} has {found} regions, and so {found} stages"
        )
    half = config.placement is Placement.V
    default = config.devices == ((config.stages + 1) // 2 if half else config.stages)
    return dataclasses.replace(config, stages=found, devices=0 if default else config.devices)


def _rows(options: PlanOptions, model: ModelShapes) -> tuple[int, str]:
    """How many rows a step looks up in the first tie, and where that comes from."""
    config = options.config
    vocab = model.ties[0].shape[0] if model.ties else 1
    if config.num_rows:
        if config.num_rows > vocab:
            raise ConfigError(f"--rows {config.num_rows}: the table has only {vocab:,} rows")
        return config.num_rows, "given"
    if options.text is None:
        return expected_rows(config.tokens, vocab), f"a Zipf law, exponent {ZIPF_EXPONENT}"
    return _counted_rows(options, vocab), f"the mean of {_TEXT_STEPS} steps of {options.text}"


def _counted_rows(options: PlanOptions, vocab: int) -> int:
    """The mean number of different ids in a step of the text, in a vocabulary learnt from it."""
    import numpy as np

    from piper_owner.data.batches import TokenStream
    from piper_owner.data.text import read_text
    from piper_owner.data.vocabulary import encode

    config = options.config
    with Console(file=sys.stderr).status("learning a vocabulary (Ctrl+C ends it) ..."):
        tokens = encode(read_text(options.text), vocab, cache_dir=cache_folder())
    stream = TokenStream(
        tokens,
        microbatches=config.microbatches,
        microbatch_size=max(1, config.microbatch_tokens // config.sequence),
        sequence_length=min(config.sequence, config.microbatch_tokens),
    )
    found = [len(np.unique(stream.batch(step).ids)) for step in range(_TEXT_STEPS)]
    return -(-sum(found) // len(found))


def print_comparison(comparison: Comparison, rows_from: str, console: Console) -> None:
    """Print everything; readable at 80 columns."""
    model, config = comparison.model, comparison.config
    best = comparison.plans[comparison.advice]
    for line in _title(model, config, rows_from):
        console.print(line)
    console.print()
    if not best.ownership.ties:
        console.print("no tied parameter")
    for tie in best.ownership.ties:
        console.print(_describe_tie(tie, owned=best.method is not Method.ALL_REDUCE), soft_wrap=False)
    console.print()
    console.print(_methods_table(comparison))
    for method, why in comparison.impossible.items():
        console.print(f"{method.value} is not possible: {why}")
    console.print()
    console.print(f"memory by rank, {best.method.value}")
    console.print(_memory_table(best))
    console.print()
    console.print(f"a step, {best.method.value}, {format_seconds(best.timing.step_seconds)}")
    ranks = _shown(best)
    busy = busy_shares(best)
    for rank, row in zip(ranks, timeline_rows(best.timing, ranks, _CHART), strict=True):
        console.print(f"{rank:>4} {row} {busy[rank]:>5.0%}")
    console.print(f"     {LEGEND}")
    if len(best.memory) > len(ranks):
        console.print(
            f"     ({len(best.memory) - len(ranks)} ranks between them are left out, here and above)"
        )
    console.print()
    console.print(f"advice: {best.method.value}; {comparison.reason}.")
    for line in _assumptions(config):
        console.print(line)


def _title(model: ModelShapes, config: PlanConfig, rows_from: str) -> list[str]:
    masters = f" with {config.master_dtype} masters" if config.master_dtype else ""
    side = f", {config.pipelines} pipelines side by side" if config.pipelines > 1 else ""
    looked_up = f" look up {config.num_rows:,} different rows ({rows_from})" if model.ties else ""
    return [
        f"{model.name}: {model.num_parameters:,} parameters, {config.dtype}{masters}, "
        f"{config.optimizer.value}",
        f"{_several(config.stages, 'stage')} on {_several(config.devices, 'device')} "
        f"({config.placement.value}), {config.schedule.value}, "
        f"{_several(config.microbatches, 'microbatch')}{side}",
        f"{_several(config.tokens, 'token')} a step{looked_up}",
    ]


def _several(count: int, what: str) -> str:
    ending = "" if count == 1 else "es" if what.endswith("ch") else "s"
    return f"{count:,} {what}{ending}"


def _describe_tie(tie: TiePlan, *, owned: bool) -> str:
    shape = " x ".join(map(str, tie.shape))
    lines = [f"tie {' = '.join(tie.tie.names)}: one parameter, {shape} {tie.dtype}"]
    for holder in tie.holders:
        stages = ", ".join(map(str, holder.stages))
        where = f"stage {stages}, {holder.use.value} use"
        if not owned:
            lines.append(f"  rank {holder.rank} has a copy ({where})")
        elif holder.rank == tie.owner:
            lines.append(f"  rank {holder.rank} owns it ({where}): {tie.reason}")
        else:
            keeps = "only the rows in use" if holder.layout is Layout.ROWS else "a copy"
            lines.append(f"  rank {holder.rank} keeps {keeps} ({where})")
    return "\n".join(lines)


def _methods_table(comparison: Comparison) -> Table:
    plans = list(comparison.plans.values())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    for plan in plans:
        owners = plan.owners
        who = f"rank {owners[0]} owns" if len(owners) == 1 else f"{len(owners)} owners"
        about = {Method.NAIVE: "wrong", Method.ALL_REDUCE: "two copies"}.get(plan.method, who)
        about = about if plan.ownership.ties else "no tie"
        table.add_column(f"{plan.method.value}\n{about}", justify="right", no_wrap=True)

    def add(label: str, figure: Callable[[MethodPlan], str]) -> None:
        table.add_row(label, *(figure(plan) for plan in plans))

    add("a step", lambda plan: format_seconds(plan.timing.step_seconds))
    add("exposed sync", lambda plan: format_seconds(plan.exposed_seconds) if plan.exposed_seconds else "0 s")
    add("messages of ties", lambda plan: str(plan.messages))
    add("sent by the busiest", lambda plan: format_bytes(plan.busiest))
    if comparison.config.pipelines > 1:
        add("sent across", lambda plan: format_bytes(max(t.across for t in plan.traffic.values())))
    add("optimizer of ties", lambda plan: format_bytes(_tied_state(plan, comparison)))
    table.add_section()
    for rank in _shown(plans[0]):
        table.add_row(f"memory, rank {rank}", *(format_bytes(plan.memory[rank].total) for plan in plans))
    if len(plans[0].memory) > _MOST_RANKS:
        add("memory, fullest rank", lambda plan: format_bytes(plan.peak))
    return table


def _shown(plan: MethodPlan) -> list[int]:
    """Ranks to show: all, or the first and the last, where ties are."""
    ranks = sorted(plan.memory)
    half = _MOST_RANKS // 2
    return ranks if len(ranks) <= _MOST_RANKS else [*ranks[:half], *ranks[-half:]]


def _tied_state(plan: MethodPlan, comparison: Comparison) -> int:
    """Masters and optimizer state of ties on all ranks: what all tensors have, less that of the others."""
    kept = sum(memory.masters + memory.optimizer for memory in plan.memory.values())
    return kept - comparison.untied_state


def _memory_table(plan: MethodPlan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("rank", justify="right", no_wrap=True)
    for kind in (*KINDS, "total"):
        table.add_column(_SHORT.get(kind, kind), justify="right", no_wrap=True)
    for rank in _shown(plan):
        memory = plan.memory[rank]
        cells = [format_bytes(size) if size else "-" for size in memory.to_dict().values()]
        table.add_row(str(rank), *cells)
    return table


def _assumptions(config: PlanConfig) -> list[str]:
    speed = (
        "stages as long as --stage-seconds says"
        if config.stage_seconds
        else f"devices that reach {config.flops:.3g} operations/s"
    )
    return [
        "",
        f"assumed: links of {config.bandwidth / 1e9:.4g} GB/s each way and "
        f"{config.latency * 1e6:.3g} us a message, {speed}, backwards of two forwards, optimizers at "
        f"{config.memory_bandwidth / 1e9:.4g} GB/s; ties and activations do not slow each other down; no "
        "barrier between steps. Activations are an estimate.",
    ]
