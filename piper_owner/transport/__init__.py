"""Ordered lines between pairs of ranks, and checked, chunked messages over them."""

from piper_owner.transport.base import Board, Boards, Channel, Fabric, Failure, Group, Work
from piper_owner.transport.gloo import GlooFabric
from piper_owner.transport.memory import MemoryFabric, MemoryNetwork
from piper_owner.transport.messages import BytesSent, Incoming, Line, Outgoing
from piper_owner.transport.view import FabricView, pipeline_views
from piper_owner.transport.wire import Header, Phase

__all__ = [
    "Board",
    "Boards",
    "BytesSent",
    "Channel",
    "Fabric",
    "FabricView",
    "Failure",
    "GlooFabric",
    "Group",
    "Header",
    "Incoming",
    "Line",
    "MemoryFabric",
    "MemoryNetwork",
    "Outgoing",
    "Phase",
    "Work",
    "pipeline_views",
]
