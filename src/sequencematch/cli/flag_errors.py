"""Errors that name a command's flag where the library names its argument."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def flags_in_errors(flag_of: Callable[[str], str]) -> Iterator[None]:
    """Replace the argument that an error begins with; `flag_of` returns an argument without a flag as it is."""
    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(r"^`(\w+)`", lambda found: f"`{flag_of(found[1])}`", str(error))) from error
