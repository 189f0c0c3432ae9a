"""One parameter, several pipeline stages, one copy.

    import piper_owner as po

Everything that a user needs stands in `__all__`. Importing the package imports neither torch nor
ray: planning who owns a tied parameter needs neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from piper_owner.errors import (
    CheckpointError,
    ConfigError,
    DagError,
    DagParseError,
    DataError,
    DeadlockError,
    DirectiveError,
    DryRunError,
    ExchangeError,
    InputError,
    MessageMismatchError,
    MisorderedMessageError,
    PeerLostError,
    PeerTimeoutError,
    PiperOwnerError,
    ReplicaMismatchError,
    ResourceError,
    RowIndexError,
    RowsError,
    RuleViolationError,
    RunError,
    TieError,
    TraceError,
    UnmatchedMessageError,
)
from piper_owner.ownership import OwnershipPlan, Tie, elect_owner, plan_ownership

if TYPE_CHECKING:
    from piper_owner.assignment import Ownership, assign_owners
    from piper_owner.frontends.piper.annotation import annotate
    from piper_owner.grad_scaler import GradScaler
    from piper_owner.optimizer_wrap import OwnerOptimizer
    from piper_owner.ties import find_ties

__version__ = "0.1.0"

# What needs torch is loaded when it is first asked for.
_LAZY = {
    "GradScaler": "piper_owner.grad_scaler",
    "OwnerOptimizer": "piper_owner.optimizer_wrap",
    "Ownership": "piper_owner.assignment",
    "annotate": "piper_owner.frontends.piper.annotation",
    "assign_owners": "piper_owner.assignment",
    "find_ties": "piper_owner.ties",
}

__all__ = [
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


def __getattr__(name: str) -> object:
    if name in ("checkpoint", "memory"):  # as in `piper_owner.checkpoint.save(...)`
        return importlib.import_module(f"piper_owner.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
