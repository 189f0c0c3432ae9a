"""What `import piper_owner` gives, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import piper_owner

EXPORTED = [
    "CheckpointError",
    "ConfigError",
    "DagError",
    "DagParseError",
    "DataError",
    "DeadlockError",
    "DirectiveError",
    "DryRunError",
    "ExchangeError",
    "GradScaler",
    "InputError",
    "MessageMismatchError",
    "MisorderedMessageError",
    "OwnerOptimizer",
    "Ownership",
    "OwnershipPlan",
    "PeerLostError",
    "PeerTimeoutError",
    "PiperOwnerError",
    "ReplicaMismatchError",
    "ResourceError",
    "RowIndexError",
    "RowsError",
    "RuleViolationError",
    "RunError",
    "Tie",
    "TieError",
    "TraceError",
    "UnmatchedMessageError",
    "__version__",
    "annotate",
    "assign_owners",
    "elect_owner",
    "find_ties",
    "plan_ownership",
]


def test_exported_names_are_exactly_these() -> None:
    assert sorted(piper_owner.__all__) == EXPORTED
    assert len(set(piper_owner.__all__)) == len(piper_owner.__all__)


def test_every_exported_name_is_there() -> None:
    for name in piper_owner.__all__:
        assert getattr(piper_owner, name) is not None


def test_nothing_public_is_left_out_of_all() -> None:
    modules = {"errors", "ownership"}
    public = {name for name, value in vars(piper_owner).items() if not name.startswith("_")}
    loaded = {name for name in public if isinstance(getattr(piper_owner, name), type(sys))}
    assert public - loaded - {"TYPE_CHECKING", "annotations"} <= set(piper_owner.__all__)
    assert modules <= loaded


def test_error_tree_has_one_root() -> None:
    from piper_owner import errors

    for name in errors.__all__:
        assert issubclass(getattr(errors, name), piper_owner.PiperOwnerError)
        assert getattr(piper_owner, name) is getattr(errors, name)


def test_import_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, piper_owner\n"
        "heavy = sorted({'torch', 'ray', 'rich', 'tokenizers', 'numpy'} & set(sys.modules))\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
