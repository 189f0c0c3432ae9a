"""Every error that piper-owner raises on purpose.

    PiperOwnerError
    |-- InputError (ValueError)          what the user gave cannot work
    |   |-- TieError                     a tie names wrong or unlike parameters
    |   |-- ConfigError                  an option, or options that contradict each other
    |   |-- DirectiveError               a schedule program, or one directive of it
    |   |-- RowIndexError (IndexError)   an id is outside the vocabulary
    |   |-- DataError                    a text that cannot be trained on
    |   |-- TraceError                   a model that cannot be traced, or split by its annotations
    |   `-- ResourceError                the cluster is smaller than asked for
    |-- DagError (ValueError)            a TrainingDAG that must not run
    |   |-- DagParseError                its text form does not parse
    |   |-- RuleViolationError           it breaks a rule of the rule table
    |   `-- DryRunError                  the dry run cannot finish it
    |       |-- DeadlockError
    |       |-- UnmatchedMessageError
    |       `-- MisorderedMessageError
    |-- ExchangeError (RuntimeError)     the tied sync failed while running
    |   |-- MessageMismatchError         a message is not the one expected
    |   |-- PeerTimeoutError (TimeoutError)
    |   `-- PeerLostError (ConnectionError)
    |-- ReplicaMismatchError (RuntimeError)
    |-- RowsError (RuntimeError)         a table that keeps rows only was used without them
    `-- RunError (RuntimeError)          a rank of a run failed

Each message says what happened, to which parameter, rank and stage, and what to do about it.
"""

from __future__ import annotations

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
    "InputError",
    "MessageMismatchError",
    "MisorderedMessageError",
    "PeerLostError",
    "PeerTimeoutError",
    "PiperOwnerError",
    "ReplicaMismatchError",
    "ResourceError",
    "RowIndexError",
    "RowsError",
    "RuleViolationError",
    "RunError",
    "TieError",
    "TraceError",
    "UnmatchedMessageError",
]


class PiperOwnerError(Exception):
    """Root of the tree: `except piper_owner.PiperOwnerError` catches all of it and nothing else."""


class InputError(PiperOwnerError, ValueError):
    """What the user gave cannot work; nothing was started and nothing was changed."""


class TieError(InputError):
    """A tie names a parameter that is missing, is named twice, or is unlike its partners."""


class ConfigError(InputError):
    """An option has a value that cannot work, or two options contradict each other."""


class DirectiveError(InputError):
    """A schedule program does not parse, or one of its directives cannot work; quotes the directive."""


class RowIndexError(InputError, IndexError):
    """An id is outside the vocabulary, or is no integer."""


class DataError(InputError):
    """The text to train on is missing, empty, binary or too short."""


class CheckpointError(InputError):
    """A checkpoint is missing or damaged, does not fit the model, or cannot be written."""


class TraceError(InputError):
    """A model cannot be traced into one fixed graph, or its annotations do not split it into stages."""


class ResourceError(InputError):
    """The cluster has fewer resources than the run asks for."""


class DagError(PiperOwnerError, ValueError):
    """A TrainingDAG that must not run."""


class DagParseError(DagError):
    """The text form of an action or a TrainingDAG does not parse."""


class RuleViolationError(DagError):
    """A TrainingDAG breaks a rule of the rule table."""


class DryRunError(DagError):
    """The dry run of all ranks cannot finish the TrainingDAG."""


class DeadlockError(DryRunError):
    """Ranks wait for one another for ever."""


class UnmatchedMessageError(DryRunError):
    """A message is sent that nobody receives, or awaited that nobody sends."""


class MisorderedMessageError(DryRunError):
    """The next message of a pair is not the one that its receiver expects."""


class ExchangeError(PiperOwnerError, RuntimeError):
    """The tied sync failed while running."""

    awaited: tuple[int, ...] = ()
    """The ranks for which this one waited in vain; none where it failed by itself."""


class MessageMismatchError(ExchangeError):
    """A message arrived that is not the one expected (tie, step, shape, dtype or chunk)."""


class PeerTimeoutError(ExchangeError, TimeoutError):
    """A peer did not answer within the timeout."""


class PeerLostError(ExchangeError, ConnectionError):
    """The connection to a peer broke: it failed, was killed, or its host went away."""


class ReplicaMismatchError(PiperOwnerError, RuntimeError):
    """A replica does not hold the owner's value."""


class RowsError(PiperOwnerError, RuntimeError):
    """A table that keeps rows only was used without them, or in another way than by looking rows up."""


class RunError(PiperOwnerError, RuntimeError):
    """A rank of a run failed; the message carries that rank's own error."""
