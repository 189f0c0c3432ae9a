"""The TrainingDAG: typed actions, the graph of all ranks, its text form, rules and passes."""

from __future__ import annotations

__all__: list[str] = []
