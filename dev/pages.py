"""Stage the pages of the docs site in build/pages: every Markdown page of the repository, in the same place.

python dev/pages.py

Links then work as they do in the repository. A page may link to a file that is no page, such as examples/dates.py: the site
shows such a file as a page of its own. `make docs` runs this, then MkDocs.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "pages"
#: The site has the Markdown files of the root, and those below these folders.
FOLDERS = ("docs", "dev", "results", "examples")
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)$", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json", ".jsonl": "json"}
STYLE = Path("docs", "site.css")
#: Files that the site shows as pictures.
PICTURES = (".png", ".svg", ".gif")


def pages(root: Path = ROOT) -> list[Path]:
    """Every Markdown page of the repository, relative to its root."""
    found = [*root.glob("*.md"), *(path for folder in FOLDERS for path in (root / folder).rglob("*.md"))]
    return sorted(path.relative_to(root) for path in found)


def links(text: str) -> Iterator[tuple[str, str]]:
    """The links of a page that lead into the repository: file, and anchor or nothing. Blocks of code hold none."""
    for match in LINK.finditer(FENCE.sub("", text)):
        yield match[2], match[3] or ""


def staged(text: str, page: Path, root: Path = ROOT) -> str:
    """A page as the site has it: a link to a file that is no page leads to the page that shows it."""

    def lead(match: re.Match[str]) -> str:
        target, name = (root / page).parent / match[2], match[2].rstrip("/")
        if target.is_dir():
            name += "/README.md"
        elif target.suffix not in (".md", *PICTURES):
            name += ".md"
        return f"{match[1]}{name}{match[3] or ''})"

    texts, fences = FENCE.split(text), [*FENCE.findall(text), ""]
    return "".join(LINK.sub(lead, prose) + fence for prose, fence in zip(texts, fences, strict=True))


def shown(path: Path) -> str:
    """The page that shows a file."""
    text = path.read_text()
    return (
        f"---\nsearch:\n  exclude: true\n---\n# {path.name}\n\n~~~~{LANGUAGES.get(path.suffix, 'text')}\n{text}\n~~~~\n"
    )


def stage(root: Path = ROOT, to: Path = PAGES) -> None:
    """Write all pages, the pictures on them, and the files that they link to."""
    shutil.rmtree(to, ignore_errors=True)
    for page in pages(root):
        text = (root / page).read_text()
        (to / page).parent.mkdir(parents=True, exist_ok=True)
        (to / page).write_text(staged(text, page, root))
        for target, _ in links(text):
            path = (root / page.parent / target).resolve()
            if not path.is_file() or path.suffix == ".md":
                continue
            place = to / path.relative_to(root)
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix in PICTURES:
                shutil.copyfile(path, place)
            else:
                place.with_name(f"{path.name}.md").write_text(shown(path))
    if (root / STYLE).is_file():
        shutil.copyfile(root / STYLE, to / STYLE)


if __name__ == "__main__":
    stage()
