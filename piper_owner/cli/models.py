"""The model that the command is given by its name."""

from __future__ import annotations

import os

from piper_owner.executor.source import GPTSource, ModelSource
from piper_owner.frontends.piper.source import AnnotatedModel

__all__ = ["model_source"]


def model_source(name: str) -> ModelSource:
    """The model called `name`: gpt, or module:function of an annotated one in this folder or installed.

    Raises ConfigError for any other name.
    """
    if name == "gpt":
        return GPTSource()
    # Absolute: the workers run in other folders.
    return AnnotatedModel(target=name, folder=os.getcwd())
