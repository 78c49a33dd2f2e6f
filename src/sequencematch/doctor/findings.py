"""A finding: what was looked at, what it is, and what would mend it."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

#: "broken" parts are essential. "off" parts are not used here, for the reason that is given.
State = Literal["ok", "off", "broken"]


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    state: State
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """Heading → findings, in the order in which they were made."""

    sections: dict[str, list[Finding]]

    @property
    def is_usable(self) -> bool:
        """Whether nothing essential is broken."""
        return not any(finding.state == "broken" for section in self.sections.values() for finding in section)

    def to_json(self) -> dict[str, Any]:
        """For `--json`: whether the installation is usable, and all findings."""
        sections = {heading: [asdict(finding) for finding in found] for heading, found in self.sections.items()}
        return {"usable": self.is_usable, "sections": sections}
