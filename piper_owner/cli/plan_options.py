"""The command line of `piper-owner plan`; it needs no torch.

Values are read as text and checked here, so that a wrong one gives one line, however long it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, TypeVar

from piper_owner.errors import ConfigError
from piper_owner.ownership import OwnerChoice
from piper_owner.paths import check_output
from piper_owner.planning.config import DTYPE_BYTES, Optimizer, PlanConfig, Transfer
from piper_owner.planning.presets import PRESETS
from piper_owner.planning.units import parse_bytes, parse_rate, parse_seconds
from piper_owner.schedules import Placement, Schedule

__all__ = ["HUGGING_FACE", "PlanOptions", "add_plan", "read_plan"]

E = TypeVar("E", bound=Enum)

_DEFAULT: Final = PlanConfig()
_SIZES: Final = {"vocab": 8192, "hidden": 128, "layers": 4, "heads": 0}
HUGGING_FACE: Final = "hf:"
_LONGEST: Final = 60
_LARGEST: Final = 2**40
# What is looped over must end: the Zipf law goes through a vocabulary, a text through a step's tokens.
_LIMITS: Final = {"vocab": 10**7, "hidden": 2**24, "layers": 10**6, "heads": 2**24}
_MOST_TEXT_TOKENS: Final = 2**24

_DESCRIPTION: Final = """\
Say what a model with a tied table costs on a layout of devices, before anything
runs: who owns the table, which messages a step sends, what each device keeps,
and how long a step takes, for all-reduce, owner with copies (dense) and owner
with rows side by side; and which of them to take. Nothing is started, and a
preset needs no torch.

A preset is a published model by its sizes; without one it is the GPT that
piper-owner train trains, of --vocab, --hidden and --layers, or --model.
"""

_EXAMPLES: Final = """\
examples:
  piper-owner plan --preset gemma-2-2b --stages 4 --schedule 1f1b \\
      --bandwidth 25GB/s --tokens 16384
  piper-owner plan --vocab 32000 --hidden 512 --layers 8 --bandwidth 1gbit
  piper-owner plan --model hf:openai-community/gpt2 --stages 2 --json FILE

presets:
{presets}

exit status:
  0 done, 1 failed, 2 bad input, 130 interrupted
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What `piper-owner plan` was asked for. `config.num_rows` is 0 where it is to be estimated.

    sizes: of the GPT, by option, where neither `preset` nor another `model` is given.
    """

    config: PlanConfig
    owner: OwnerChoice
    preset: str | None
    model: str
    sizes: dict[str, int]
    text: Path | None
    json: Path | None
    emit_directives: Path | None
    trace: Path | None = None
    stages_given: bool = False

    @property
    def is_annotated(self) -> bool:
        """Whether the model is built by a function of the user's."""
        return self.model != "gpt" and not self.model.startswith(HUGGING_FACE)


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    plan = commands.add_parser(
        "plan",
        help="say what a tied model costs on a layout of devices, before anything runs",
        description=_DESCRIPTION,
        epilog=_EXAMPLES.format(presets=_listed(PRESETS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_model(plan)
    _add_pipeline(plan)
    _add_training(plan)
    _add_machine(plan)
    group = plan.add_argument_group("output")
    _option(group, "json", "FILE", "write all figures to this file (default: none)")
    _option(
        group,
        "emit-directives",
        "FILE",
        "write the schedule to this file as a program of directives (default: none)",
    )
    _option(
        group,
        "trace",
        "FILE",
        "write the steps of the advised way as a trace, as 'piper-owner train --trace' does those of a run "
        "(default: none)",
    )


def _listed(names: Iterable[str], width: int = 76) -> str:
    lines = [" "]
    for name in names:
        if len(lines[-1]) + len(name) + 1 > width:
            lines.append(" ")
        lines[-1] += f" {name}"
    return "\n".join(lines)


def _option(group: argparse._ArgumentGroup, name: str, metavar: str, text: str) -> None:
    group.add_argument(f"--{name}", metavar=metavar, default=None, help=text.replace("%", "%%"))


def _add_model(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("model")
    _option(group, "preset", "NAME", "a published model by its sizes; see below (default: none)")
    _option(
        group,
        "model",
        "MODEL",
        "gpt; hf:NAME_OR_PATH for one that transformers knows; or module:function of an annotated one, which "
        "is called with vocab_size=, with a stage for each region. Built without values (default: gpt)",
    )
    _option(group, "vocab", "N", f"tokens in the GPT's vocabulary (default: {_SIZES['vocab']})")
    _option(group, "hidden", "N", f"its width (default: {_SIZES['hidden']})")
    _option(group, "layers", "N", f"its blocks (default: {_SIZES['layers']})")
    _option(group, "heads", "N", "its attention heads (default: 4, or 1 where 4 does not divide it)")


def _add_pipeline(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("pipeline")
    _option(group, "stages", "N", f"parts that the model is cut into (default: {_DEFAULT.stages})")
    _option(group, "devices", "N", "devices of a pipeline (default: one per stage; half as many under v)")
    _option(group, "placement", "WHICH", f"{_one_of(Placement)} (default: loop)")
    _option(group, "schedule", "WHICH", f"{_one_of(Schedule)} (default: 1f1b)")
    _option(group, "microbatches", "N", f"pieces of a batch (default: {_DEFAULT.microbatches})")
    _option(group, "dp", "N", "pipelines side by side, on other data (default: 1)")
    _option(group, "owner", "WHO", "auto, first, last, or a rank; auto elects by the figures (default: auto)")
    _option(
        group,
        "transfer",
        "WHEN",
        "early: a dense gradient travels while the schedule still runs, into a buffer of its size, as with "
        "attach; streamed: chunk by chunk when the owner steps, as in piper-owner train (default: early)",
    )
    _option(group, "chunk-bytes", "SIZE", "size of a chunk (default: 4MiB)")


def _add_training(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("training")
    _option(group, "optimizer", "WHICH", f"{_one_of(Optimizer)}; sgd has momentum (default: adamw)")
    _option(group, "dtype", "WHICH", f"of weights and messages: {', '.join(DTYPE_BYTES)} (default: bfloat16)")
    _option(
        group,
        "master-dtype",
        "WHICH",
        "of master weights and optimizer state where wider than --dtype, or none (default: float32)",
    )
    _option(group, "tokens", "N", f"tokens of a step of one pipeline (default: {_DEFAULT.tokens})")
    _option(group, "sequence-length", "N", "tokens in a sequence (default: a microbatch is one)")
    _option(
        group,
        "text",
        "PATH",
        "a text file or folder: count the rows that its steps look up, in a vocabulary learnt from it "
        "(default: estimate them by a Zipf law)",
    )
    _option(group, "rows", "N", "different rows that a step looks up, where you know (default: as --text)")


def _add_machine(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("machine")
    _option(
        group, "bandwidth", "RATE", "of a link, each way: 25GB/s, 1gbit, or bytes a second (default: 25GB/s)"
    )
    _option(group, "latency", "TIME", "of a message: 10us, 0.2ms, seconds (default: 10us)")
    _option(group, "flops", "N", "operations per second that a device reaches, such as 2e14 (default: 2e14)")
    _option(group, "memory-bandwidth", "RATE", "of a device's memory, which bounds a step (default: 2TB/s)")
    _option(
        group, "stage-seconds", "LIST", "forward of a microbatch by stage, as 10ms,12ms (default: by --flops)"
    )
    _option(group, "device-memory", "SIZE", "of a device, such as 80GB (default: not known)")


def _one_of(kinds: type[Enum]) -> str:
    return ", ".join(str(kind.value) for kind in kinds)


def read_plan(arguments: argparse.Namespace) -> PlanOptions:
    """What the parsed arguments ask for. Raises ConfigError for values that cannot work."""
    given = {name: value for name, value in vars(arguments).items() if isinstance(value, str)}
    config = PlanConfig(
        stages=_whole(given, "stages", _DEFAULT.stages),
        devices=_whole(given, "devices", 0),
        placement=_choice(given, "placement", Placement.LOOP),
        schedule=_choice(given, "schedule", Schedule.ONE_F_ONE_B),
        microbatches=_whole(given, "microbatches", _DEFAULT.microbatches),
        pipelines=_whole(given, "dp", 1),
        optimizer=_choice(given, "optimizer", Optimizer.ADAMW),
        dtype=_dtype(given, "dtype", "bfloat16", tuple(DTYPE_BYTES)),
        master_dtype=_master(given),
        tokens=_whole(given, "tokens", _DEFAULT.tokens),
        sequence=_whole(given, "sequence_length", 0),
        num_rows=_whole(given, "rows", 0),
        bandwidth=parse_rate("--bandwidth", given.get("bandwidth", "25GB/s")),
        latency=parse_seconds("--latency", given.get("latency", "10us")),
        flops=_number("--flops", given.get("flops", "2e14")),
        memory_bandwidth=parse_rate("--memory-bandwidth", given.get("memory_bandwidth", "2TB/s")),
        stage_seconds=_stage_seconds(given),
        device_memory=parse_bytes("--device-memory", given["device_memory"])
        if "device_memory" in given
        else None,
        chunk_bytes=parse_bytes("--chunk-bytes", given.get("chunk_bytes", "4MiB")),
        transfer=_choice(given, "transfer", Transfer.EARLY),
    )
    options = PlanOptions(
        config=config,
        owner=_owner(given.get("owner", "auto")),
        preset=given.get("preset"),
        model=_model(given.get("model", "gpt")),
        sizes={name: _whole(given, name, default) for name, default in _SIZES.items()},
        text=_path(given, "text"),
        json=_path(given, "json"),
        emit_directives=_path(given, "emit_directives"),
        trace=_path(given, "trace"),
        stages_given="stages" in given,
    )
    _check_model(options, given)
    check_output("--json", options.json)
    check_output("--emit-directives", options.emit_directives)
    check_output("--trace", options.trace)
    return options


def _check_model(options: PlanOptions, given: dict[str, str]) -> None:
    sized = [f"--{name}" for name in _SIZES if name in given]
    if options.is_annotated:  # it is built for a vocabulary
        sized = [option for option in sized if option != "--vocab"]
    if options.preset is not None and "model" in given:
        raise ConfigError("--preset and --model: give one of them")
    if sized and (options.preset is not None or options.model != "gpt"):
        what = "--preset" if options.preset is not None else "--model"
        raise ConfigError(f"{', '.join(sized)} with {what}, which has its own sizes; give one or the other")
    if options.text is not None and options.config.tokens > _MOST_TEXT_TOKENS:
        raise ConfigError(
            f"--tokens {options.config.tokens} with --text: at most {_MOST_TEXT_TOKENS:,} are counted"
        )
    if "rows" in given and options.text is not None:
        raise ConfigError("--rows and --text: give one of them")


def _model(text: str) -> str:
    module, colon, rest = text.partition(":")
    if text != "gpt" and not (module and colon and rest and len(text) <= 4096):
        raise ConfigError(f"--model {_cut(text)}: give gpt, hf:NAME_OR_PATH or module:function")
    return text


def _cut(text: str) -> str:
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return text if text.isascii() and text.isprintable() else ascii(text)


def _whole(given: dict[str, str], name: str, default: int) -> int:
    text = given.get(name)
    if text is None:
        return default
    digits = text.replace("_", "").replace(",", "")
    value = int(digits) if len(digits) <= 15 and digits.isascii() and digits.isdecimal() else 0
    limit = _LIMITS.get(name, _LARGEST)
    if not 1 <= value <= limit:
        option = name.replace("_", "-")
        raise ConfigError(f"--{option} {_cut(text)}: a whole number from 1 to {limit:,} is needed")
    return value


def _number(option: str, text: str) -> float:
    try:
        value = float(text) if len(text) <= _LONGEST else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{option} {_cut(text)}: a positive, finite number is needed, such as 2e14")
    return value


def _choice(given: dict[str, str], name: str, default: E) -> E:
    text = given.get(name)
    for kind in type(default) if text is not None else ():
        if kind.value == text:
            return kind
    if text is not None:
        raise ConfigError(f"--{name} {_cut(text)}: choose one of {_one_of(type(default))}")
    return default


def _dtype(given: dict[str, str], name: str, default: str, known: tuple[str, ...]) -> str:
    text = given.get(name, default)
    if text not in known:
        option = name.replace("_", "-")
        raise ConfigError(f"--{option} {_cut(text)}: choose one of {', '.join(known)}")
    return text


def _master(given: dict[str, str]) -> str | None:
    name = _dtype(given, "master_dtype", "float32", (*DTYPE_BYTES, "none"))
    return None if name == "none" else name


def _stage_seconds(given: dict[str, str]) -> tuple[float, ...]:
    text = given.get("stage_seconds")
    if text is None:
        return ()
    return tuple(parse_seconds("--stage-seconds", part) for part in text.split(",", 1_000_000))


def _owner(text: str) -> OwnerChoice:
    match text:
        case "auto" | "first" | "last":
            return text
        case _ if len(text) <= 9 and text.isascii() and text.isdecimal():
            return int(text)
        case _:
            raise ConfigError(f"--owner {_cut(text)}: choose auto, first, last, or the number of a rank")


def _path(given: dict[str, str], name: str) -> Path | None:
    text = given.get(name)
    if text is None:
        return None
    if not text or len(text) > 4096 or "\0" in text:
        raise ConfigError(f"--{name.replace('_', '-')} {_cut(text)}: this is no path")
    return Path(text)
