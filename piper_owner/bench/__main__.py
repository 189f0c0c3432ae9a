"""The process of one rank: `python -m piper_owner.bench FOLDER RANK`, started by `launch`."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
from torch._C._distributed_c10d import FileStore

from piper_owner.bench.config import BenchConfig, Host
from piper_owner.bench.launch import RESULT, SPEC, STEP_TOKENS, STORE, TOKENS
from piper_owner.bench.rank import run_rank

__all__ = ["main"]


def main() -> None:
    """Run this rank; rank 0 leaves the result in the folder."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    spec = json.loads((folder / SPEC).read_text(encoding="utf-8"))
    config = BenchConfig(**spec["config"])
    host = Host(**{**spec["hosts"][rank], "command": ()})
    # On a file that both have, since the only link between them is the one that is measured.
    store = FileStore(str(folder / STORE), 2)
    store.set_timeout(timedelta(seconds=config.timeout_seconds))
    result = run_rank(config, host, rank, store, np.load(folder / TOKENS), np.load(folder / STEP_TOKENS))
    if rank == 0:
        (folder / RESULT).write_text(json.dumps(result.to_json()), encoding="utf-8")


if __name__ == "__main__":
    main()
