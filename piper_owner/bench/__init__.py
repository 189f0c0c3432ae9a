"""Times the ways to keep two uses of one table in step, between two processes and the link between them."""

from __future__ import annotations

__all__: list[str] = []
