"""A record for people: Markdown for a file, a table for the terminal."""

from pathlib import Path
from typing import TYPE_CHECKING

from sequencematch.data.files import write_files
from sequencematch.data.markdown import as_markdown, escaped, quoted, table_lines
from sequencematch.evaluation.record import Record
from sequencematch.evaluation.samples import Sample
from sequencematch.metrics import Measure

if TYPE_CHECKING:
    from rich.table import Table

_MARKS = {True: "✓", False: "✗", None: ""}
#: Texts longer than this, or of several lines, don't go into a table; of a long prompt only the end is shown.
_FITS_A_TABLE, _END_OF_PROMPT = 160, 200


def save(record: Record, folder: str | Path) -> None:
    """Write `results.json` and `report.md`."""
    write_files(folder, {"results.json": record.to_json(), "report.md": report(record)})


def table(record: Record) -> "Table":
    """The measures as a table for the terminal."""
    from rich.table import Table

    found = Table(title=f"{record.task}, {record.count} rows", title_justify="left")
    for heading in ("metric", "value", "95 % interval", "n"):
        found.add_column(heading, justify="left" if heading == "metric" else "right")
    for measure in record.measures:
        found.add_row(measure.name, *_numbers(measure))
    return found


def report(record: Record) -> str:
    """Measures, generations with deletions struck through, signatures, and the command to repeat them, in Markdown."""
    lines = [f"# {escaped(record.task)}: {escaped(record.model)}", "", _summary(record), ""]
    lines += table_lines(
        ["metric", "value", "95 % interval", "n"],
        [[escaped(measure.name), *_numbers(measure)] for measure in record.measures],
    )
    plain = [sample for sample in record.samples if not sample.given]
    if plain:
        texts = [text for sample in plain for text in (sample.question, sample.reference)]
        is_short = all(len(text) <= _FITS_A_TABLE and "\n" not in text for text in texts)
        lines += [
            "",
            "## Generations",
            "",
            "Deleted text is ~~struck~~; ↵ is a new line, … a row that was cut.",
            "",
        ]
        lines += _sample_table(plain) if is_short else _sample_blocks(plain)
    wrong = "a wrong token" if record.mistakes == 1 else f"{record.mistakes} wrong tokens"
    drawn = "" if record.wrong_tokens is None else f", drawn from {escaped(record.wrong_tokens)}"
    chosen = f", the likeliest by {escaped(record.scorer or '')}"
    for is_plausible, heading, which in ((False, "a mistake", drawn), (True, "a plausible mistake", chosen)):
        mistaken = [sample for sample in record.samples if sample.given and sample.is_plausible == is_plausible]
        if mistaken:
            after = f"The same rows, with a correct prefix of the answer and {wrong} after the prompt{which}."
            lines += ["", f"## After {heading}", "", after, "", *_sample_table(mistaken)]
    lines += ["", "## Signatures", "", "```text", record.signature]
    lines += [*(measure.signature for measure in record.measures), "```"]
    if record.command is not None:
        lines += ["", "## Command", "", "```bash", record.command, "```"]
    return "\n".join(lines) + "\n"


def _summary(record: Record) -> str:
    greedy = record.sampling["temperature"] == 0
    how = "greedy decoding" if greedy else f"drawn at temperature {record.sampling['temperature']:g}"
    return (
        f"{record.count} rows of {escaped(record.task)}, at most {record.sampling['max_new_tokens']} tokens after each prompt, "
        f"{how}; {record.seconds:.0f} s on {escaped(record.machine)}."
    )


def _numbers(measure: Measure) -> tuple[str, str, str]:
    if not measure.count:  # a share of nothing
        return "–", "–", "0"
    value, _, interval = str(measure).removeprefix(f"{measure.name} ").partition(" ")
    return value, interval.strip("[]").replace(", ", " – "), str(measure.count)


def _sample_table(samples: list[Sample]) -> list[str]:
    columns = {
        "prompt": [escaped(sample.question) for sample in samples],
        "given": [escaped(sample.given) for sample in samples],
        "actions": [as_markdown(sample.written) for sample in samples],
        "in the end": [escaped(sample.final) for sample in samples],
        "reference": [escaped(sample.reference) for sample in samples],
        "right": [_MARKS[sample.is_right] for sample in samples],
    }
    filled = {heading: cells for heading, cells in columns.items() if any(cells)}
    return table_lines(list(filled), [list(map(str.strip, row)) for row in zip(*filled.values(), strict=True)])


def _sample_blocks(samples: list[Sample]) -> list[str]:
    lines: list[str] = []
    for number, sample in enumerate(samples, 1):
        end = sample.question[-_END_OF_PROMPT:]
        prompt = escaped(("…" if end != sample.question else "") + end)
        lines += [f"**{number}.** {prompt}", "", quoted(as_markdown(sample.written)), ""]
        lines += [f"In the data: {escaped(sample.reference)}", ""]
    return lines[:-1]
