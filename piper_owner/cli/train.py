"""`piper-owner train`: read the text, train on Ray, show and keep the result."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from piper_owner.checkpoint import read_index
from piper_owner.cli.models import model_source
from piper_owner.cli.options import TrainOptions
from piper_owner.cli.output import cache_folder, write_json, write_text
from piper_owner.cli.progress import show_progress
from piper_owner.cli.render import print_result
from piper_owner.cli.report import train_page
from piper_owner.cli.termination import orderly_termination
from piper_owner.data.text import read_text
from piper_owner.data.vocabulary import encode
from piper_owner.errors import ConfigError, RunError
from piper_owner.executor.config import RunKind
from piper_owner.executor.devices import check_local_gpus
from piper_owner.executor.plan import plan_run, resolve_run
from piper_owner.executor.recording import Recording, trace_of_run
from piper_owner.executor.results import TrainResult
from piper_owner.executor.source import ModelSource
from piper_owner.executor.stream import token_stream
from piper_owner.runtime import environment
from piper_owner.runtime.address import check_address
from piper_owner.runtime.signals import Stopped
from piper_owner.tracing.chrome import format_trace

if TYPE_CHECKING:
    from piper_owner.runtime.keeping import Keeping

__all__ = ["check", "run", "write_json"]


def check(options: TrainOptions) -> tuple[TrainOptions, ModelSource]:
    """`options` with what the model and its schedule decide, and the model. Plans every run; starts nothing.

    Raises InputError, or DagError for a schedule that must not run.
    """
    if options.address is not None:
        check_address(options.address)
    source = model_source(options.config.model)
    asked, options = options.config, replace(options, config=resolve_run(options.config, source))
    if options.stages_given and options.config.stages != asked.stages:
        raise ConfigError(
            f"--stages {asked.stages}: {asked.model} has {options.config.stages} regions, and so "
            f"{options.config.stages} stages; leave --stages out, or change the regions"
        )
    if options.address is None:
        check_local_gpus(options.config.num_ranks, options.config.gpu_share)
    for kind in (RunKind.OWNER, *options.compare):
        if kind is not RunKind.REFERENCE:
            plan_run(options.config, kind, source)
    if options.checkpoint.path is not None and options.checkpoint.resume:
        read_index(options.checkpoint.path)
    return options, source


def run(options: TrainOptions, source: ModelSource) -> int:
    """Train as asked, print the tables to stdout (progress to stderr), and return the exit status.

    Both are as `check` gives them. Raises InputError before anything starts, RunError when a rank fails.
    A run that a signal has stopped, and that was saved, ends with 128 and the signal's number.
    """
    out, notes = Console(file=sys.stdout), Console(file=sys.stderr, highlight=False)
    text, tokens = _read_tokens(options)
    if options.pictures.profile is not None:
        with _writing("--profile", options.pictures.profile):
            options.pictures.profile.mkdir(exist_ok=True)
    try:
        result = _train(options, source, text, tokens, notes)
    except Stopped as stopped:
        notes.print(_describe_stop(stopped, options.checkpoint.path), soft_wrap=True, markup=False)
        return 128 + stopped.number
    print_result(result, out)
    if options.json is not None:
        with _writing("--json", options.json):
            write_json(options.json, result.to_json())
    _write_pictures(options, result)
    return 0


def _describe_stop(stopped: Stopped, path: Path | None) -> str:
    """What has become of a run that a signal has stopped, and how to go on."""
    text = "piper-owner: interrupted; everything that was started has ended"
    if stopped.failure:
        text += f"; the last steps could not be saved ({stopped.failure})"
    if not stopped.is_kept:
        return f"{text}; no step was taken that could be saved"
    return (
        f"{text}; {path} holds the run up to step {stopped.step}, and the same command with --resume goes on"
    )


@contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"{option} {path}: cannot write it: {error.strerror or error}") from error


def _write_pictures(options: TrainOptions, result: TrainResult) -> None:
    pictures = options.pictures
    if pictures.trace is not None:
        title = f"piper-owner train, {result.config.schedule}"
        with _writing("--trace", pictures.trace):
            write_text(pictures.trace, format_trace(trace_of_run(result.records, title=title)))
    if pictures.report is not None:
        with _writing("--report", pictures.report):
            write_text(pictures.report, train_page(result))
    if pictures.profile is not None:
        for rank, record in enumerate(result.records):
            file = pictures.profile / f"rank{rank}.json.gz"
            with _writing("--profile", file):
                file.write_bytes(record.profile or b"")


def _recording(options: TrainOptions) -> Recording | None:
    pictures = options.pictures
    if not pictures.records:
        return None
    first = max(0, options.config.steps - pictures.steps)
    return Recording(first_step=first, profile=pictures.profile is not None)


def _keeping(options: TrainOptions) -> Keeping | None:
    from piper_owner.runtime.keeping import Keeping

    asked = options.checkpoint
    return None if asked.path is None else Keeping(path=asked.path, every=asked.every, resume=asked.resume)


def _read_tokens(options: TrainOptions) -> tuple[str, NDArray[np.int32]]:
    """Where the text comes from, and its tokens; checked to be enough for one sequence."""
    text = read_text(options.text)
    tokens = encode(text, options.config.vocab, cache_dir=cache_folder())
    token_stream(options.config, tokens)
    return text.source, tokens


def _train(
    options: TrainOptions, source: ModelSource, text: str, tokens: NDArray[np.int32], notes: Console
) -> TrainResult:
    environment.prepare(options.address)
    # Only now, because Ray reads the environment when it is imported.
    from piper_owner.runtime import driver

    # Ray prints the death of a worker to stdout from a thread of its own; our error says it better.
    with (
        orderly_termination(),
        show_progress(notes, options.config, (RunKind.OWNER, *options.compare)) as shown,
        redirect_stdout(io.StringIO()),
    ):
        return driver.train(
            options.config,
            tokens,
            text=text,
            compare=options.compare,
            source=source,
            address=options.address,
            on_step=shown.on_step,
            on_restart=shown.on_restart,
            on_stop=shown.on_stop,
            recording=_recording(options),
            keeping=_keeping(options),
            max_restarts=options.checkpoint.max_restarts,
            snapshot=options.checkpoint.snapshot,
        )
