"""Refuses arguments of a wrong type or value, in words, before ranks open anything to one another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from piper_owner.errors import ConfigError, TieError
from piper_owner.ownership import Scope, Tie

__all__ = ["check_names", "check_uses", "is_timeout", "read_settings", "ties_of"]


def is_timeout(timeout: object) -> bool:
    """Whether `timeout` is None, or a positive timedelta."""
    return timeout is None or (isinstance(timeout, timedelta) and timeout > timedelta(0))


def read_settings(*, timeout: object, owner: object, layout: object, scope: object) -> dict[str, Any]:
    """The last three, ready for JSON. Raises ConfigError for what cannot be right on any rank."""
    if not is_timeout(timeout):
        raise ConfigError(
            f"timeout={timeout!r}: give a positive datetime.timedelta, such as timedelta(seconds=60), or "
            "None for that of the group"
        )
    _check_choice("owner", owner)
    _check_choice("layout", layout)
    known = [each.value for each in Scope]
    if scope not in known:
        raise ConfigError(f"scope={scope!r}; choose one of {known}")
    return {
        "owner": dict(owner) if isinstance(owner, Mapping) else owner,
        "layout": dict(layout) if isinstance(layout, Mapping) else layout,
        "scope": scope,
    }


def _check_choice(option: str, choice: object) -> None:
    """Raise ConfigError unless `choice` is a word or a rank, or a mapping from names to those."""
    for name, each in choice.items() if isinstance(choice, Mapping) else [("", choice)]:
        if not isinstance(name, str):
            raise ConfigError(
                f"{option}= has the key {name!r} ({type(name).__name__}); its keys are first names of ties, "
                "strings"
            )
        if not isinstance(each, str | int):
            where = f"{option}[{name!r}]" if name else option
            raise ConfigError(f"{where} is {each!r} ({type(each).__name__}); give a word or a rank")


def check_uses(uses: object) -> None:
    """Raise ConfigError unless `uses` is None, or a mapping from names."""
    if uses is None:
        return
    if not isinstance(uses, Mapping) or not all(isinstance(name, str) for name in uses):
        raise ConfigError(f"uses={uses!r}: give a mapping, such as {{'embed.weight': 'lookup'}}")


def check_names(names: object) -> None:
    """Raise ConfigError unless `names` is None, a mapping or a function."""
    if not (names is None or isinstance(names, Mapping) or callable(names)):
        raise ConfigError(
            f"names={names!r}: give a mapping {{name in the stage: name in the model}}, or a function"
        )


def ties_of(ties: object) -> list[Tie]:
    """`ties` as Tie objects. Raises ConfigError where they are no sequence, TieError where one is no tie."""
    if isinstance(ties, str | Tie) or not isinstance(ties, Iterable):
        raise ConfigError(
            f"ties={ties!r}: give a list of ties, such as find_ties(full_model), "
            "[('embed.weight', 'head.weight')] or []"
        )
    found = []
    for tie in ties:
        if isinstance(tie, str) or not isinstance(tie, Tie | Iterable):
            raise TieError(
                f"ties= has {tie!r} in it, but a tie is a tuple of names: "
                "ties=[('embed.weight', 'head.weight')] is one tie of two names"
            )
        found.append(tie if isinstance(tie, Tie) else Tie(tuple(tie)))
    return found
