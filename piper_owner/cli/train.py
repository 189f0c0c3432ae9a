"""`piper-owner train`: read the text, train on Ray, show and keep the result."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from piper_owner.cli.models import model_source
from piper_owner.cli.options import TrainOptions
from piper_owner.cli.output import cache_folder, write_json
from piper_owner.cli.progress import show_progress
from piper_owner.cli.render import print_result
from piper_owner.cli.termination import orderly_termination
from piper_owner.data.text import read_text
from piper_owner.data.vocabulary import encode
from piper_owner.errors import RunError
from piper_owner.executor.config import RunKind
from piper_owner.executor.plan import plan_run, resolve_run
from piper_owner.executor.results import TrainResult
from piper_owner.executor.source import ModelSource
from piper_owner.executor.stream import token_stream
from piper_owner.runtime import environment
from piper_owner.runtime.address import check_address

__all__ = ["run", "write_json"]


def run(options: TrainOptions) -> int:
    """Train as asked, print the tables to stdout (progress to stderr), and return the exit status.

    Raises InputError before anything starts, RunError when a rank fails.
    """
    out, notes = Console(file=sys.stdout), Console(file=sys.stderr, highlight=False)
    if options.address is not None:
        check_address(options.address)
    source = model_source(options.config.model)
    options = replace(options, config=resolve_run(options.config, source))
    for kind in (RunKind.OWNER, *options.compare):
        if kind is not RunKind.REFERENCE:
            plan_run(options.config, kind, source)
    text, tokens = _read_tokens(options)
    result = _train(options, source, text, tokens, notes)
    print_result(result, out)
    if options.json is not None:
        try:
            write_json(options.json, result.to_json())
        except OSError as error:
            raise RunError(f"--json {options.json}: cannot write it: {error.strerror or error}") from error
    return 0


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
        show_progress(notes, options.config, (RunKind.OWNER, *options.compare)) as on_step,
        redirect_stdout(io.StringIO()),
    ):
        return driver.train(
            options.config,
            tokens,
            text=text,
            compare=options.compare,
            source=source,
            address=options.address,
            on_step=on_step,
        )
