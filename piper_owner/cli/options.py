"""The command line: its options, their help, and what they give."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, NoReturn

from piper_owner.cli.bench_options import add_bench
from piper_owner.cli.checkpoint_options import CheckpointOptions, add_checkpoint, read_checkpoint
from piper_owner.cli.memory_options import add_memory
from piper_owner.cli.plan_options import add_plan
from piper_owner.cli.programs import read_program
from piper_owner.cli.trace_options import PictureOptions, add_pictures, read_pictures
from piper_owner.cli.verify_options import add_verify
from piper_owner.errors import ConfigError
from piper_owner.executor.config import (
    DEVICES,
    DTYPES,
    LAYOUTS,
    LEARNING_RATES,
    OPTIMIZERS,
    PLACEMENTS,
    SCHEDULES,
    SCOPES,
    RunKind,
    TrainConfig,
)
from piper_owner.ownership import OwnerChoice
from piper_owner.paths import path_option, readable

__all__ = ["TrainOptions", "build_parser", "read"]

_DEFAULTS: Final = {field.name: field.default for field in fields(TrainConfig)}
_IN_PROGRAM: Final = ("stages", "devices", "placement", "schedule", "microbatches", "dp")
_COMPARED: Final = tuple(kind for kind in RunKind if kind is not RunKind.OWNER)

_DESCRIPTION: Final = """\
Train a small GPT as a pipeline of stages on several devices. Its output head is
its input embedding: one parameter, "tied".

The embedding sits on the first stage and the head on the last one, so two
devices use the same parameter. Here one of them owns it: it alone keeps
optimizer state and steps the parameter. The other one sends its gradient once
per step. The embedding's device keeps no table at all: it fetches the rows
that the step looks up (--layout). --compare proves it.
"""

_EXAMPLES: Final = """\
examples:
  piper-owner train
      four stages on four local workers, on Python's own source as text
  piper-owner train --compare reference,naive,allreduce
      the same, beside three other ways to train the same model
  piper-owner train --dtype float64 --steps 5 --compare reference --json FILE
      compare to the last bits, and keep the figures
  piper-owner train --trace trace.json --report report.html
      see each rank's steps in ui.perfetto.dev, and the run as one page
  piper-owner train --checkpoint run --every 10
      keep the run; later --resume goes on from there, also on other stages
  piper-owner train --checkpoint run --every 100 --snapshot 5 --max-restarts 3
      a worker that is killed costs five steps at most, and changes nothing
  piper-owner train --layout dense
      both devices keep a working copy; the embedding's owns it
  piper-owner train --model my_models:build --directives schedule.json
      your annotated model, under your own schedule
  piper-owner train --placement v --stages 4
      first and last stage on one device: the tie needs no message

exit status:
  0 done, 1 a run failed, 2 bad input (found before anything starts),
  130 interrupted, 143 ended by SIGTERM; with --checkpoint the run is saved
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What `piper-owner train` was asked for, checked as far as the machine is not needed."""

    config: TrainConfig
    compare: tuple[RunKind, ...] = ()
    text: Path | None = None
    json: Path | None = None
    address: str | None = None
    pictures: PictureOptions = field(default_factory=PictureOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    stages_given: bool = False


class _Noted(argparse.Action):
    """Stores the value, and that it was given: a default may give way without a word, a wish may not."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.given = {*getattr(namespace, "given", ()), self.dest}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, whatever was given; so are its commands'."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # noqa: ANN401 - as in argparse
        """As in argparse, which takes the value of `--option=--` to be none, and gives a list for it."""
        for given in sys.argv[1:] if args is None else args:
            if given.startswith("-") and given.endswith("=--"):
                self.error(f"argument {given.partition('=')[0]}: expected one argument")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Show the usage and `message`, and exit with 2."""
        super().error(readable(message))


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser: argparse.ArgumentParser = _Parser(
        prog="piper-owner",
        description="Pipeline-parallel training with one copy of every tied parameter.",
    )
    parser.add_argument("--version", action="version", version=f"piper-owner {_version()}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a tied GPT under pipeline parallelism, and compare it with other ways",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_pipeline(train)
    _add_model(train)
    _add_training(train)
    _add_data(train)
    _add_output(train)
    add_checkpoint(train)
    add_pictures(train)
    _add_cluster(train)
    add_plan(commands)
    add_memory(commands)
    add_bench(commands)
    add_verify(commands)
    return parser


def read(arguments: argparse.Namespace) -> TrainOptions:
    """What the parsed arguments ask for.

    Raises ConfigError for values that cannot work, and for an output that cannot be written.
    """
    values: dict[str, Any] = {name: getattr(arguments, name) for name in _DEFAULTS if name in arguments}
    values["owner"] = _read_owner(arguments.owner)
    given: set[str] = getattr(arguments, "given", set())
    if arguments.directives is not None:
        if twice := [f"--{name}" for name in _IN_PROGRAM if name in given]:
            raise ConfigError(
                f"{', '.join(twice)} with --directives, whose program says that; give one or the other"
            )
        values["program"] = read_program(arguments.directives)
    return TrainOptions(
        config=TrainConfig(**values),
        compare=_read_compare(arguments.compare),
        text=arguments.text,
        json=arguments.json,
        address=arguments.address,
        pictures=read_pictures(arguments),
        checkpoint=read_checkpoint(arguments),
        stages_given="stages" in given,
    )


def _version() -> str:
    try:
        return importlib.metadata.version("piper-owner")
    except importlib.metadata.PackageNotFoundError:
        return "(run from a checkout that is not installed)"


def _add_pipeline(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pipeline")
    _add(group, "stages", int, "N", "parts that the model is cut into")
    group.add_argument(
        "--devices",
        type=int,
        action=_Noted,
        default=0,
        metavar="N",
        help="workers that share the stages (default: one per stage; half as many under --placement v)",
    )
    _choose(
        group,
        "placement",
        PLACEMENTS,
        "which device gets which stage; loop: 0 1 2 0 1 2; v: 0 1 2 2 1 0, first and last stage together",
    )
    _choose(
        group,
        "schedule",
        SCHEDULES,
        "order of the microbatches; gpipe: all forwards, then all backwards; 1f1b: in turn, for less memory; "
        "interleaved: 1f1b for several stages a device; zbv and dualpipev: for two stages a device under "
        "--placement v, backwards split in two so that devices wait less",
    )
    _add(group, "microbatches", int, "N", "pieces of each pipeline's batch, so that stages work at once")
    _add(
        group,
        "dp",
        int,
        "N",
        "equal pipelines side by side, each with devices and a batch of its own; gradients are averaged",
    )
    _choose(
        group,
        "scope",
        SCOPES,
        "who owns a tied parameter among several pipelines; pipeline: a device in each; global: one device "
        "in the whole job, which steps for all",
    )
    _add_ownership(group)
    _add_directives(group)


def _add_ownership(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--owner",
        default=str(_DEFAULTS["owner"]),
        metavar="WHO",
        help="who owns the tied parameter: auto, first (the embedding's device), last (the head's), or a "
        "rank (default: %(default)s)",
    )
    _choose(
        group,
        "layout",
        LAYOUTS,
        "what the embedding's device keeps; rows: no table, only the rows that a step looks up; dense: a "
        "working copy; auto: rows where the head's device may own",
    )
    _add(group, "chunk_bytes", int, "BYTES", "size of the pieces in which gradients and weights travel")


def _add_directives(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--directives",
        type=path_option,
        default=None,
        metavar="FILE",
        help="a schedule program, a JSON array of directives, that says which device runs which stage and in "
        "which order, in place of --stages, --devices, --placement, --schedule, --microbatches and --dp, "
        "which are refused beside it; 'piper-owner verify' checks it (default: none)",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=_DEFAULTS["model"],
        metavar="NAME",
        help="gpt, the small GPT of the options below; or module:function, a function that is called with "
        "vocab_size= and returns an annotated model, of one stage for each region (default: %(default)s)",
    )
    _add(group, "layers", int, "N", "transformer blocks")
    _add(group, "hidden", int, "N", "width of the model, a multiple of --heads")
    _add(group, "heads", int, "N", "attention heads per block")
    _add(group, "vocab", int, "N", "tokens in the vocabulary, at least 256")
    _choose(
        group, "dtype", DTYPES, "number format of weights and arithmetic; float64 compares to the last bits"
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    _add(group, "steps", int, "N", "optimizer steps")
    _choose(group, "optimizer", OPTIMIZERS, "how weights are updated; sgd has momentum 0.9")
    rates = ", ".join(f"{rate:g} for {name}" for name, rate in LEARNING_RATES.items())
    group.add_argument(
        "--lr", type=float, default=None, metavar="RATE", help=f"learning rate (default: {rates})"
    )
    group.add_argument(
        "--clip",
        type=float,
        default=None,
        metavar="NORM",
        help="scale gradients down to this global norm when they exceed it (default: no clipping)",
    )
    _add(group, "seed", int, "N", "start value of the random weights")


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--text",
        type=path_option,
        default=None,
        metavar="PATH",
        help="a text file, or a folder of them, to train on (default: the Python standard library's source)",
    )
    _add(group, "microbatch_size", int, "N", "sequences in a microbatch")
    _add(group, "sequence_length", int, "N", "tokens in a sequence")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("comparison and output")
    group.add_argument(
        "--compare",
        default="",
        metavar="RUNS",
        help="also train in these ways, on the same data from the same seed; a comma list of reference (one "
        "process, no pipeline), naive (two copies, never synchronised) and allreduce (two copies, gradients "
        "added on both) (default: none)",
    )
    _add(
        group,
        "check_every",
        int,
        "N",
        "prove after every N steps that each replica is bit for bit its owner's value, and end the run where "
        "one is not; costs a transfer of the tied weights; 0: only at the end",
    )
    group.add_argument(
        "--json",
        type=path_option,
        default=None,
        metavar="FILE",
        help="write all figures to this file (default: none)",
    )


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--address",
        default=None,
        metavar="HOST:PORT",
        help="a running Ray cluster to join, or auto for the one on this machine (default: start a local "
        "Ray, and end it afterwards)",
    )
    _choose(
        group,
        "device",
        DEVICES,
        "where stages run: cuda gives each rank a GPU, of those that CUDA_VISIBLE_DEVICES shows",
    )
    group.add_argument(
        "--gpus-per-rank",
        type=float,
        default=_DEFAULTS["gpus_per_rank"],
        metavar="SHARE",
        help="with --device cuda, the share of a GPU that a rank gets; 0.5 puts two ranks on each "
        "(default: %(default)g)",
    )
    group.add_argument(
        "--timeout",
        dest="timeout_seconds",
        type=float,
        default=_DEFAULTS["timeout_seconds"],
        metavar="SECONDS",
        help="longest wait of one rank for another, and for the cluster's CPUs (default: %(default)g)",
    )


def _add(group: argparse._ArgumentGroup, name: str, kind: type, metavar: str, text: str) -> None:
    group.add_argument(
        f"--{name.replace('_', '-')}",
        dest=name,
        type=kind,
        action=_Noted,
        default=_DEFAULTS[name],
        metavar=metavar,
        help=f"{text} (default: %(default)s)",
    )


def _choose(group: argparse._ArgumentGroup, name: str, choices: tuple[str, ...], text: str) -> None:
    group.add_argument(
        f"--{name}",
        choices=choices,
        action=_Noted,
        default=_DEFAULTS[name],
        help=f"{text} (default: %(default)s)",
    )


def _read_owner(text: str) -> OwnerChoice:
    match text:
        case "auto" | "first" | "last":
            return text
        case _ if len(text) <= 9 and text.isascii() and text.isdecimal():
            return int(text)
        case _:
            raise ConfigError(f"--owner {text}: choose auto, first, last, or the number of a rank")


def _read_compare(text: str) -> tuple[RunKind, ...]:
    known = {kind.value: kind for kind in _COMPARED}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            also = "; the owner run is always there" if name == RunKind.OWNER.value else ""
            raise ConfigError(f"--compare {name}: choose among {', '.join(known)}{also}")
    return tuple(kind for kind in _COMPARED if kind.value in names)
