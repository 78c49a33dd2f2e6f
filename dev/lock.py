"""Write requirements.lock: the versions in constraints.txt with the SHA-256 of every file of theirs on a package index.

python dev/lock.py INDEX [FOLDER …] > requirements.lock

INDEX is the address of a simple index (PEP 503). Wheels in a FOLDER count, too, such as a build of torch for CPUs.
"""

import hashlib
import html
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def normal(name: str) -> str:
    """A project's name as an index spells it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read(url: str) -> str:
    """A page of the index."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def files(index: str, name: str) -> Iterator[tuple[str, str]]:
    """The files of a project: name and SHA-256."""
    place = f"{index.rstrip('/')}/{normal(name)}/"
    for link in re.findall(r'href="([^"]+)"', read(place)):
        address, _, digest = urllib.parse.urljoin(place, html.unescape(link)).partition("#sha256=")
        yield urllib.parse.unquote(address.rpartition("/")[2]), digest


def is_of(file: str, name: str, version: str) -> bool:
    """Whether a file is one of that version: a wheel of any platform, or the source."""
    stem = re.sub(r"\.(tar\.gz|zip|whl)$", "", file)
    if file.endswith(".whl"):
        project, found = stem.split("-")[:2]
    else:
        project, _, found = stem.rpartition("-")
    return normal(project) == normal(name) and found.partition("+")[0] == version


def main(index: str, *folders: str) -> None:
    """Print the lock file."""
    tested = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#"))
    local = [path for folder in folders for path in sorted(Path(folder).glob("*.whl"))]
    print("# Made by dev/lock.py from constraints.txt; CONTRIBUTING.md says how to install it.")
    for name, version in sorted(tested.items(), key=lambda item: normal(item[0])):
        hashes = [digest for file, digest in files(index, name) if is_of(file, name, version)]
        hashes += [hashlib.sha256(path.read_bytes()).hexdigest() for path in local if is_of(path.name, name, version)]
        assert hashes, f"no file of {name} {version}"
        print(f"{name}=={version}", *(f"--hash=sha256:{d}" for d in dict.fromkeys(hashes)), sep=" \\\n    ")


if __name__ == "__main__":
    main(*sys.argv[1:])
