"""The examples that come with the package: recipes, rows and a task, named as in the repository."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
#: Where the folder `examples` is: inside an installed package, or at the root of the repository.
_PLACES = (_PACKAGE, _PACKAGE.parents[1])


def find_packaged(path: str | Path) -> Path:
    """The path itself; or, if it begins with `examples/` and nothing is there, the package's example of that name."""
    path = Path(path)
    if path.exists() or path.parts[:1] != ("examples",):
        return path
    return next((place / path for place in _PLACES if (place / path).is_file()), path)
