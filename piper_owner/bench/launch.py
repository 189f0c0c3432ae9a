"""Starts the two ranks of a benchmark as processes of their own, and brings home what they measured."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from piper_owner.bench.config import BenchConfig, Host
from piper_owner.bench.result import BenchResult
from piper_owner.data.batches import TokenStream
from piper_owner.data.text import read_text
from piper_owner.data.vocabulary import encode
from piper_owner.errors import DataError, RunError

__all__ = ["LOCAL", "RESULT", "SPEC", "STEP_TOKENS", "STORE", "TOKENS", "run_pair"]

LOCAL: Final = (Host(), Host())
"""Both ranks on this machine, over its loopback interface."""

# Files of the folder that the ranks share.
SPEC, TOKENS, STEP_TOKENS, STORE, RESULT = "spec.json", "tokens.npy", "steps.npy", "store", "result.json"

_POLL_SECONDS: Final = 0.1
_GRACE_SECONDS: Final = 15.0


def run_pair(config: BenchConfig, hosts: tuple[Host, Host], *, text: Path | None = None) -> BenchResult:
    """Measure between a process on each of `hosts`, which share this machine's files.

    The vocabularies are learnt from `text` (None: the Python standard library's source) each time; nothing
    is left on disk. No process that was started outlives the call.

    Raises DataError for a text that is too short, ConfigError for one that cannot be read, and
    RunError, with a rank's own words, when it fails.
    """
    with tempfile.TemporaryDirectory(prefix="piper-owner-bench-") as name:
        folder = Path(name)
        for file, tokens in zip((TOKENS, STEP_TOKENS), _tokens(config, text, folder), strict=True):
            np.save(folder / file, tokens)
        spec = {"config": asdict(config), "hosts": [asdict(host) for host in hosts]}
        (folder / SPEC).write_text(json.dumps(spec), encoding="utf-8")
        _run_processes(hosts, folder)
        return BenchResult.from_json(json.loads((folder / RESULT).read_text(encoding="utf-8")))


def _tokens(
    config: BenchConfig, path: Path | None, folder: Path
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    text = read_text(path)
    tokens = encode(text, config.vocab, cache_dir=folder)
    if tokens.size < config.tokens:
        raise DataError(
            f"the text has only {tokens.size} tokens, and --tokens asks for {config.tokens}: give a longer "
            "text, or fewer tokens"
        )
    if config.skip_steps:
        return tokens, tokens[:0]
    step_tokens = encode(text, config.steps_vocab, cache_dir=folder)
    train = config.train_config("dense")
    TokenStream(
        step_tokens,
        microbatches=train.microbatches,
        microbatch_size=train.microbatch_size,
        sequence_length=train.sequence_length,
    )
    return tokens, step_tokens


def _run_processes(hosts: tuple[Host, Host], folder: Path) -> None:
    """Run both ranks to their end. When one fails, the other has a while to say so too."""
    ranks: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"log-{rank}" for rank in range(len(hosts))]
    try:
        for rank, host in enumerate(hosts):
            command = [*host.command, sys.executable, "-m", "piper_owner.bench", str(folder), str(rank)]
            with logs[rank].open("wb") as log:
                # A session of their own: Ctrl+C reaches this process alone, which then ends them.
                ranks.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        deadline = float("inf")
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            if deadline == float("inf") and any(rank.poll() for rank in ranks):
                deadline = time.monotonic() + _GRACE_SECONDS
            with suppress(subprocess.TimeoutExpired):
                next(rank for rank in ranks if rank.poll() is None).wait(_POLL_SECONDS)
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()
    failed = [rank for rank, process in enumerate(ranks) if process.returncode]
    if failed:
        said = "\n".join(f"rank {rank}: {_last_line(logs[rank])}" for rank in failed)
        raise RunError(f"the benchmark failed\n{said}")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "ended without a word"
