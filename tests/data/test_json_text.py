"""Results are strict JSON, whatever numbers they hold."""

import json
import math

import pytest

from sequencematch.data.json_text import json_text
from sequencematch.metrics import Measure


def refuse(name: str) -> None:
    raise ValueError(name)


def test_numbers_that_are_not_finite_become_null_at_any_depth() -> None:
    value = {"a": [1.5, math.nan, (math.inf, {"b": -math.inf})], "c": "NaN", "d": None, "e": 3}
    text = json_text(value)
    assert json.loads(text, parse_constant=refuse) == {
        "a": [1.5, None, [None, {"b": None}]],
        "c": "NaN",
        "d": None,
        "e": 3,
    }
    assert text.endswith("}\n")
    with pytest.raises(ValueError, match="NaN"):  # the control: json alone writes what it should not
        json.loads(json.dumps(value), parse_constant=refuse)


def test_a_measure_of_nothing_is_read_back_as_it_was() -> None:
    measure = Measure("own errors deleted", math.nan, math.nan, math.nan, 0, "own errors deleted|n:0")
    found = Measure.read(json.loads(json_text(vars(measure)), parse_constant=refuse))
    assert str(found) == str(measure)
    assert found.count == 0
    assert math.isnan(found.value)
