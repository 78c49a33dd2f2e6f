"""Python files of your own that a setting names, such as a task's or a divergence's."""

import importlib
import importlib.util
import sys
from types import ModuleType

from sequencematch.data.packaged import find_packaged


def load_module(setting: str, place: str) -> ModuleType:
    """The module at `path/to/file.py` or of the name `package.module`; errors name the setting."""
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # the module exists, but one of its imports does not
            raise ValueError(f"`{setting}` must be in a file or a module. Got {place}: {error}.") from error
    path = find_packaged(place)
    if not path.is_file():
        raise ValueError(f"`{setting}` must be in an existing file. Got {place}.")
    spec = importlib.util.spec_from_file_location(f"{setting} in {place}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses resolve annotations there
    spec.loader.exec_module(module)
    return module
