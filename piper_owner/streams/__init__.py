"""Streams and events of a device behind one small interface, and one for the CPU that checks the order.

`AcceleratorStreams` has not run on a device yet. What the exchange does with streams runs over
`CheckedStreams` in the tests, which fails where a wait is missing.
"""

from piper_owner.streams.accelerator import AcceleratorStreams, is_capturing, refuse_capture
from piper_owner.streams.base import Event, Stream, Streams
from piper_owner.streams.checked import CheckedStreams, StreamOrderError
from piper_owner.streams.choice import checked_streams, streams_of

__all__ = [
    "AcceleratorStreams",
    "CheckedStreams",
    "Event",
    "Stream",
    "StreamOrderError",
    "Streams",
    "checked_streams",
    "is_capturing",
    "refuse_capture",
    "streams_of",
]
