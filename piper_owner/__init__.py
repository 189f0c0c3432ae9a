"""One parameter, several pipeline stages, one copy.

    import piper_owner as po

Everything that a user needs stands in `__all__`. Importing the package imports neither torch nor
ray: planning who owns a tied parameter needs neither.
"""

from __future__ import annotations

from piper_owner.errors import (
    ConfigError,
    DagError,
    DagParseError,
    DataError,
    DeadlockError,
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
    RuleViolationError,
    RunError,
    TieError,
    UnmatchedMessageError,
)
from piper_owner.ownership import OwnershipPlan, Tie, elect_owner, plan_ownership

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DagError",
    "DagParseError",
    "DataError",
    "DeadlockError",
    "DryRunError",
    "ExchangeError",
    "InputError",
    "MessageMismatchError",
    "MisorderedMessageError",
    "OwnershipPlan",
    "PeerLostError",
    "PeerTimeoutError",
    "PiperOwnerError",
    "ReplicaMismatchError",
    "ResourceError",
    "RuleViolationError",
    "RunError",
    "Tie",
    "TieError",
    "UnmatchedMessageError",
    "__version__",
    "elect_owner",
    "plan_ownership",
]
