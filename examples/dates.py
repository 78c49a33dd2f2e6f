"""Rows of a task of your own, as a script writes them: dates in words → ISO 8601, for docs/noise.md.

    python examples/dates.py out/dates
    sequencematch train examples/dates.yaml
    sequencematch evaluate out/dates/run/final --task out/dates/test.jsonl

A row is {"prompt": "14th of March 1987? Solution:", "completion": " 1987-03-14", "noise_tokens": ["0", …, "9", "-"]}.
"""

import json
import random
import sys
from datetime import date, timedelta
from pathlib import Path

TRAIN, TEST = 4000, 300
FORMS = ("{day} {month} {year}", "{month} {day}, {year}", "{day}th of {month} {year}", "{day}.{number}.{year}")


def row(when: date, form: str) -> dict[str, object]:
    """A date in one of the forms, and the same in ISO 8601."""
    written = form.format(day=when.day, month=when.strftime("%B"), number=when.month, year=when.year)
    # Noise may be whatever an answer can hold.
    return {"prompt": f"{written}? Solution:", "completion": f" {when.isoformat()}", "noise_tokens": [*"0123456789-"]}


def main(folder: Path) -> None:
    """Write train.jsonl and test.jsonl. No date is in both."""
    draw = random.Random(0)
    days = draw.sample(range(200 * 365), TRAIN + TEST)
    rows = [row(date(1900, 1, 1) + timedelta(days=day), draw.choice(FORMS)) for day in days]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[TEST:]), ("test", rows[:TEST])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
