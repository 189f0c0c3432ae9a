"""One copy on disk: checkpoints in which a tie stands once, for any number of stages, ranks and owners."""

from __future__ import annotations

from piper_owner.checkpoint.layout import has_checkpoint, read_index
from piper_owner.checkpoint.loading import Loaded, load
from piper_owner.checkpoint.saving import async_save, save
from piper_owner.checkpoint.team import SaveHandle
from piper_owner.checkpoint.weights import export_safetensors, load_weights

__all__ = [
    "Loaded",
    "SaveHandle",
    "async_save",
    "export_safetensors",
    "has_checkpoint",
    "load",
    "load_weights",
    "read_index",
    "save",
]
