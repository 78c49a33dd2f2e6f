"""`sequencematch doctor`: what works in this installation, what doesn't, and why not."""

from sequencematch.doctor import packages
from sequencematch.doctor.findings import Finding, Report
from sequencematch.doctor.packages import BROKEN_IMPORTS, first_line


def examine(model: str | None = None, device: str | None = None) -> Report:
    """Look at packages, devices, files and a model; without a network, unless `model` is on the hub."""
    sections = {"Packages": packages.required()}
    if not Report(sections).is_usable:  # nothing else can be imported
        return Report(sections)
    try:
        from sequencematch.doctor import machine, models
    except BROKEN_IMPORTS as error:  # packages that fit one by one, but not together
        text = f"sequencematch.policy can't be imported: {first_line(error)}"
        sections["Model"] = [Finding("import", "broken", text, "pip install --force-reinstall sequencematch")]
        return Report(sections)
    sections["Devices"] = machine.devices()
    sections["Extras"] = packages.extras()
    sections["Files"] = models.files()
    sections["Model"] = models.paths(model, device)
    return Report(sections)


__all__ = ["BROKEN_IMPORTS", "Finding", "Report", "examine"]
