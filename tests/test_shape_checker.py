"""The checker of annotations refuses what they exclude, in every kind of definition: a suite without it would pass as well."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jaxtyping
import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, Int, TypeCheckError
from torch import Tensor

from sequencematch.core.objectives import repeated_ngrams
from sequencematch.policy import Sampling
from tests.shape_checker import check, checked, has_shape

pytestmark = pytest.mark.skipif(jaxtyping.config.jaxtyping_disable, reason="JAXTYPING_DISABLE is set")
REFUSED = (BeartypeCallHintViolation, TypeCheckError)


Definition = TypeVar("Definition")


def instrumented(definition: Definition) -> Definition:
    """As the import hook does it."""
    return checked(definition, typechecker=check)


@instrumented
def total(left: Float[Tensor, "row column"], right: Float[Tensor, "row column"]) -> Float[Tensor, " row"]:
    return (left + right).sum(1 if len(left) < 9 else 0)


@instrumented
@dataclass(frozen=True)
class Pair:
    values: Float[Tensor, " row"]
    count: int

    @instrumented
    def like(self, other: "Pair") -> "Pair":
        return other

    @instrumented
    def name(self) -> str:
        return self.count  # type: ignore[return-value]


@instrumented
def numbers(count: int) -> Iterator[int]:
    yield from range(count)


def inner() -> Callable[..., Any]:
    @instrumented
    def same(left: Float[Tensor, " row"], right: Float[Tensor, " row"]) -> Float[Tensor, " row"]:
        return left + right

    return same


pair = Pair(torch.zeros(3), 3)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: total(torch.zeros(2, 3), torch.zeros(1, 3)), id="an axis of two sizes"),
        pytest.param(lambda: total(torch.zeros(2, 3), torch.zeros(3)), id="an axis too few"),
        pytest.param(lambda: total(torch.zeros(2, 3).int(), torch.zeros(2, 3)), id="another dtype"),
        pytest.param(lambda: total(torch.zeros(9, 3), torch.zeros(9, 3)), id="a result of another size"),
        pytest.param(lambda: Pair(torch.zeros(3, 1), 3), id="a field's shape"),
        pytest.param(lambda: Pair(torch.zeros(3), "3"), id="a field's type"),  # type: ignore[arg-type]
        pytest.param(lambda: pair.like(3), id="a class that is being defined"),  # type: ignore[arg-type]
        pytest.param(pair.name, id="a result's type"),
        pytest.param(lambda: numbers("3"), id="a generator's argument"),  # type: ignore[arg-type]
        pytest.param(lambda: inner()(torch.zeros(3), torch.zeros(2)), id="a function inside another"),
        # The package itself, by way of the import hook.
        pytest.param(lambda: repeated_ngrams(torch.zeros(2, 5).long(), torch.zeros(3).long()), id="a shape of ours"),
        pytest.param(lambda: Sampling(top_k="5"), id="a field of ours"),  # type: ignore[arg-type]
    ],
)
def test_what_an_annotation_excludes_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(REFUSED):
        call()


def test_what_annotations_allow_passes_and_every_call_has_axes_of_its_own() -> None:
    for rows in (2, 3):
        assert total(torch.ones(rows, 3), torch.ones(rows, 3)).tolist() == [6.0] * rows
        assert inner()(torch.ones(rows), torch.ones(rows)).tolist() == [2.0] * rows
    assert pair.like(pair) is pair
    assert list(numbers(3)) == [0, 1, 2]


def test_the_sizes_of_axes_are_printed_beside_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BeartypeCallHintViolation):
        total(torch.zeros(2, 3), torch.zeros(2, 4))
    assert "row=2\ncolumn=3" in capsys.readouterr().out


def test_a_shape_is_found_inside_other_hints() -> None:
    assert has_shape(dict[str, Int[Tensor, " row"] | None])
    assert not has_shape(dict[str, Tensor | None])
