"""Settings that Ray reads from the environment, once, when it is imported.

This module itself does not import ray. Only a process that is all ours (the command) calls
`prepare`; a program that imports us as a library keeps its own settings.
"""

from __future__ import annotations

import os
import secrets
import sys

__all__ = ["prepare"]


def prepare(address: str | None) -> None:
    """Make Ray quiet, and a local Ray private to this process; call before importing ray.

    Settings that the user made stay, and where ray is imported already nothing changes: half of
    the settings would come too late, and the others would not fit them.

    A local Ray listens on the loopback address alone (Ray has no other switch for it on Linux),
    and asks for a token that only this process and its children know, so that neither another
    user nor another job can join it, and no token is left in the home folder.
    """
    if "ray" in sys.modules:
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The driver shows the error that matters, once; Ray would log those of all other ranks as well.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if address is not None:
        return
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    if not any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
