"""How two ranks move what lies on their devices: chosen alike by both, from where both say they are.

- both on the CPU, or one of them: gloo, straight from and to memory of the host;
- an accelerator at one end or both: through memory of the host (`staging`), each end for itself;
- two different CUDA GPUs, with NCCL at both ends: headers over gloo, payloads from GPU to GPU (`nccl`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from piper_owner.transport.base import Fabric
from piper_owner.transport.messages import DirectLine, Line

__all__ = ["LineOpener", "Path", "Place", "path_between", "place_of"]


class Path(enum.Enum):
    """The way of payloads between two ranks."""

    HOST = "host"
    STAGED = "staged"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the parameters of one rank lie.

    kind: of the device, such as "cpu" or "cuda"; "several" where they lie on more than one.
    uuid: of that one CUDA GPU, the same in every process and container; else empty.
    has_nccl: whether this process can make NCCL communicators.
    """

    kind: str = "cpu"
    uuid: str = ""
    has_nccl: bool = False

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Place:
        """From what `to_json` gave."""
        return cls(kind=str(fields["kind"]), uuid=str(fields["uuid"]), has_nccl=bool(fields["has_nccl"]))


def place_of(devices: Iterable[torch.device]) -> tuple[Place, torch.device | None]:
    """Where a rank is whose parameters lie on `devices`, and which device that is (None: several). Local.

    A device of "meta" counts for nothing: what is there goes to where the others are.
    """
    found = {device for device in devices if device.type != "meta"}
    if not found:
        return Place(), torch.device("cpu")
    if len(found) > 1:
        return Place(kind="several"), None
    (device,) = found
    if device.type != "cuda":
        return Place(kind=device.type), device
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return Place(kind="cuda", uuid=uuid, has_nccl=dist.is_nccl_available()), device


def path_between(one: Place, two: Place) -> Path:
    """The path between two ranks; the same whichever is first. Pure."""
    if one.kind == two.kind == "cpu":
        return Path.HOST
    is_nccl = one.kind == two.kind == "cuda" and one.has_nccl and two.has_nccl
    # Two ranks of one GPU cannot have a communicator, and without a uuid nobody knows whether they are.
    if is_nccl and one.uuid and two.uuid and one.uuid != two.uuid:
        return Path.NCCL
    return Path.STAGED


class LineOpener:
    """Opens this rank's lines: `describe`, then `learn` what every rank has described, then `open`.

    Without the first two no line has a direct one beside it.
    """

    def __init__(self, fabric: Fabric, *, chunk_bytes: int) -> None:
        self.fabric, self.chunk_bytes = fabric, chunk_bytes
        self._places: list[Place] = []
        self._device: torch.device | None = None

    def describe(self, stages: Iterable[torch.nn.Module]) -> dict[str, Any]:
        """What the other ranks need to know of where the parameters of `stages` lie. Local."""
        place, self._device = place_of(p.device for stage in stages for p in stage.parameters())
        return place.to_json()

    def learn(self, places: Iterable[Mapping[str, Any]]) -> None:
        """Take in what every rank has described, by rank. Local."""
        self._places = [Place.from_json(place) for place in places]

    def open(self, pairs: Sequence[tuple[int, int]], purpose: str) -> dict[int, Line]:
        """By peer, this rank's line to each rank of `pairs`, (lower, higher), that it is in. Collective.

        Every rank opens its lines in the order of `pairs`, with their communicators, which are not made
        when they are first used: so nobody waits in a circle.
        """
        lines = {}
        for low, high in pairs:
            if self.fabric.rank in (low, high):
                peer = high if self.fabric.rank == low else low
                channel = self.fabric.channel(peer, purpose)
                direct = self._direct(low, high, peer, purpose)
                lines[peer] = Line(channel, chunk_bytes=self.chunk_bytes, direct=direct)
        return lines

    def _direct(self, low: int, high: int, peer: int, purpose: str) -> DirectLine | None:
        if self._device is None or not self._places:
            return None
        if path_between(self._places[low], self._places[high]) is not Path.NCCL:
            return None
        there = self.fabric.over_devices(self._device)
        return DirectLine(there.channel(peer, f"{purpose} payload"), self._device)
