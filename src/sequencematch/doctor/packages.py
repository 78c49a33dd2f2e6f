"""Python and packages: versions, the ranges that this library supports, and which extras are complete."""

import importlib
import platform
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from sequencematch.doctor.findings import Finding

OWN = "sequencematch"
#: Extras for those who work on the library itself.
_FOR_DEVELOPERS = frozenset({"dev"})
#: Packages → the modules that they are imported as, where the names differ.
_MODULES = {"pyyaml": "yaml"}
#: What importing a package that is installed, but damaged or incompatible, may raise.
BROKEN_IMPORTS = (ImportError, OSError, AttributeError, RuntimeError, TypeError, ValueError)


def required() -> list[Finding]:
    """Python, this library, and the packages that it can't do without."""
    try:
        own = distribution(OWN)
    except PackageNotFoundError:
        return [Finding(OWN, "broken", "not installed, so its requirements are not known", "pip install .")]
    python = SpecifierSet(own.metadata["Requires-Python"])
    fits = python.contains(platform.python_version(), prereleases=True)
    return [
        Finding(OWN, "ok", f"{own.version} in {Path(__file__).parents[1]}"),
        Finding("python", "ok" if fits else "broken", f"{platform.python_version()} (supported: {_written(python)})"),
        *(_required(requirement) for requirement in requirements(own.requires or (), extra="")),
    ]


def extras() -> list[Finding]:
    """Every extra that users install: whether its packages are there, in versions that fit."""
    own = distribution(OWN)
    names = sorted(set(own.metadata.get_all("Provides-Extra") or ()) - _FOR_DEVELOPERS)
    return [_extra(name, own.requires or ()) for name in names]


def requirements(lines: Sequence[str], extra: str) -> Iterator[Requirement]:
    """The requirements of an extra alone, those of other extras of ours that it names included; "": of no extra."""
    for line in lines:
        requirement = Requirement(line)
        of_extra = re.search(r"extra\s*==", line) is not None
        if of_extra != bool(extra) or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        if requirement.name != OWN:
            yield requirement
            continue
        for inner in sorted(requirement.extras):
            yield from requirements(lines, inner)


def problem(requirement: Requirement) -> str | None:
    """Why a requirement is not met, as a clause; None if it is."""
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is missing"
    if not requirement.specifier.contains(found, prereleases=True):
        return f"{requirement.name} is {found}, supported is {_written(requirement.specifier)}"
    return None


def _required(requirement: Requirement) -> Finding:
    name, wrong = requirement.name, problem(requirement)
    if wrong is not None:
        return Finding(name, "broken", wrong, f"pip install '{name}{requirement.specifier}'")
    try:
        importlib.import_module(_MODULES.get(name, name.replace("-", "_")))
    except BROKEN_IMPORTS as error:
        again = f"pip install --force-reinstall '{name}{requirement.specifier}'"
        return Finding(
            name, "broken", f"{version(name)} is installed, but its import fails: {first_line(error)}", again
        )
    return Finding(name, "ok", f"{version(name)} (supported: {_written(requirement.specifier)})")


def first_line(error: Exception) -> str:
    """What an error says in its first line, or else its type."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _written(specifier: SpecifierSet) -> str:
    """A range with its lower end first."""
    return ", ".join(sorted(map(str, specifier), key=lambda part: (not part.startswith(">"), part)))


def _extra(name: str, lines: Sequence[str]) -> Finding:
    needed = list(requirements(lines, name))
    wrong = [found for found in map(problem, needed) if found is not None]
    if wrong:
        return Finding(name, "off", ", ".join(wrong), f"pip install '{OWN}[{name}]'")
    return Finding(name, "ok", ", ".join(f"{each.name} {version(each.name)}" for each in needed))
