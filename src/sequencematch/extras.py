"""Optional packages: looked for when they are needed, with the extra that brings them."""

import importlib.util


def require(package: str, extra: str, what: str) -> None:
    """Refuse to go on without a package; `what` needs it, and `pip install 'sequencematch[extra]'` brings it."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{what} needs the package {package}: pip install 'sequencematch[{extra}]'.")
