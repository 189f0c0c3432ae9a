"""The state of torch's random generators, from which dropout draws: set, kept, and put back."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

__all__ = ["draw_from", "random_states", "set_random_states", "states_from_text", "states_to_text"]

_CPU: Final = "cpu"


def draw_from(seed: int, rank: int) -> None:
    """Let what this process draws from now on depend on `seed` and `rank` alone. Local."""
    digest = hashlib.blake2b(f"{seed} on rank {rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "big") >> 1)


def random_states() -> Iterator[tuple[str, Tensor]]:
    """The state (uint8) of each generator of this process, by device; of accelerators only those in use."""
    yield _CPU, torch.get_rng_state()
    if torch.cuda.is_initialized():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            yield f"cuda:{index}", state


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Set the generators to what `random_states` gave. One of a device that is not here is left out."""
    for device, state in states.items():
        if device == _CPU:
            torch.set_rng_state(state.clone())
        elif torch.cuda.is_available() and torch.device(device).index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state.clone(), device)


def states_to_text() -> dict[str, str]:
    """`random_states` as JSON has them."""
    return {device: base64.b64encode(state.numpy().tobytes()).decode() for device, state in random_states()}


def states_from_text(texts: object) -> dict[str, Tensor] | None:
    """What `states_to_text` gave; None for anything else."""
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        return None
    try:
        found = {device: base64.b64decode(text, validate=True) for device, text in texts.items()}
    except binascii.Error:
        return None
    return {
        device: torch.frombuffer(bytearray(data), dtype=torch.uint8) for device, data in found.items() if data
    }
