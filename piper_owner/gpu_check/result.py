"""What the checks found: each ok, failed or skipped, with its figures; as a table and as JSON. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CheckResult", "Figure", "Report", "Status", "format_table"]

Figure = float | int | str | bool | None


class Status(enum.Enum):
    """How a check ended."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One check: `reason` is why it failed or was skipped; `shown` is what the table says of it."""

    name: str
    status: Status
    seconds: float = 0.0
    reason: str = ""
    shown: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready `{name, status, seconds, reason, shown, figures}`."""
        return {
            "name": self.name,
            "status": self.status.value,
            "seconds": round(self.seconds, 2),
            "reason": self.reason,
            "shown": self.shown,
            "figures": dict(self.figures),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks of one run, and the machine that they ran on."""

    machine: Mapping[str, Figure]
    checks: Sequence[CheckResult]

    @property
    def is_ok(self) -> bool:
        """Whether no check failed."""
        return all(check.status is not Status.FAILED for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """What `--json` writes."""
        return {
            "ok": self.is_ok,
            "machine": dict(self.machine),
            "checks": [check.to_dict() for check in self.checks],
        }


def format_table(report: Report) -> str:
    """The machine in a line, then a line for each check."""
    machine = ", ".join(f"{key} {value}" for key, value in report.machine.items() if value is not None)
    wide = max((len(check.name) for check in report.checks), default=0)
    lines = [machine]
    for check in report.checks:
        said = check.reason if check.status is not Status.OK else check.shown
        first = (said.splitlines() or [""])[0]
        ended = f"{check.name:<{wide}}  {check.status.value:<7}  {check.seconds:>5.1f} s"
        lines.append(f"{ended}  {first}".rstrip())
    return "\n".join(lines)
