"""Optional packages, looked for when needed; an error names the extra that installs them."""

import importlib.util


def require(package: str, extra: str, what: str) -> None:
    """Raise an error if a package is missing: `what` needs it, and `pip install 'sequencematch[extra]'` installs it."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{what} needs the package {package}: pip install 'sequencematch[{extra}]'.")
