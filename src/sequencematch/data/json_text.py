"""Results as strict JSON: NaN and infinity, which JSON does not have, become null."""

import json
import math
from typing import Any


def json_text(value: Any, indent: int = 1) -> str:
    """A value as the text of a JSON file."""
    return json.dumps(_without_non_finite(value), indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_non_finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
