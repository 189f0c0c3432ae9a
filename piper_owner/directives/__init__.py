"""Schedule programs: Piper's JSON array of directives, to and from a TrainingDAG. Needs no torch.

    program = parse_program(text, source="schedule.json")
    lowered = lower_program(program, tags=[{"PP": 0}, {"PP": 1}], stage_edges=[(0, 1)], buckets=buckets)

`docs/directives.md` is the reference of every field.
"""

from __future__ import annotations

from piper_owner.directives.emit import emit_program, format_program
from piper_owner.directives.lower import Lowered, lower_program
from piper_owner.directives.model import Program
from piper_owner.directives.parse import parse_program

__all__ = ["Lowered", "Program", "emit_program", "format_program", "lower_program", "parse_program"]
