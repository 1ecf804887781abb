"""What a person reads of a value that is refused: what stands there, what was wanted, and what to write."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError

from rlinf_api import sentences


class Shape(BaseModel, extra="forbid"):
    name: Annotated[str, Field(min_length=2, max_length=5, pattern="^[a-z]*$")] = "ab"
    count: Annotated[int, Field(ge=1, le=3)] = 1
    parts: Annotated[list[int], Field(min_length=1, max_length=2)] = [1]
    kind: Literal["small", "large"] = "small"
    text: str = ""
    labels: dict[str, str] = {}


KNOWN = "count, kind, labels, name, parts, text"


def said(**value: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Shape.model_validate(value)
    (problem,) = sentences.problems(caught.value, Shape, value=value, prefix="spec")
    return str(problem)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"count": 0}, "spec.count: got 0, wanted at least 1; change it"),
        ({"count": 4}, "spec.count: got 4, wanted at most 3; change it"),
        ({"name": "a"}, "spec.name: got 'a', wanted at least 2 characters; change it"),
        ({"name": "abcdef"}, "spec.name: got 'abcdef', wanted at most 5 characters; change it"),
        ({"name": "AB"}, "spec.name: got 'AB', wanted text that matches ^[a-z]*$; change it"),
        ({"parts": [1, 2, 3]}, "spec.parts: got 3, wanted at most 2 entries; change it"),
        ({"parts": []}, "spec.parts: got [], wanted at least 1 entries; change it"),
        ({"kind": "smal"}, "spec.kind: got 'smal', wanted 'small' or 'large'; did you mean 'small'?"),
        ({"kind": "9"}, "spec.kind: got '9', wanted 'small' or 'large'; write one of these"),
        ({"text": 7}, 'spec.text: got 7, wanted text; write it in quotes: "7"'),
        ({"text": True}, "spec.text: got true, wanted text; write that"),
        ({"labels": "a=b"}, "spec.labels: got text, wanted a mapping; write that"),
        ({"nam": "x"}, f"spec.nam: is not a field; did you mean 'name'? Known here: {KNOWN}"),
        ({"zzz": "x"}, f"spec.zzz: is not a field; remove it. Known here: {KNOWN}"),
    ],
)  # fmt: skip
def test_a_refused_value_is_a_sentence(value, sentence):
    assert said(**value) == sentence


@pytest.mark.parametrize(
    ("length", "shown"), [(78, "'" + "x" * 78 + "'"), (79, "'" + "x" * 76 + "..."), (500, "'" + "x" * 76 + "...")]
)
def test_a_long_value_is_cut_at_eighty_characters(length, shown):
    assert sentences.shown("x" * length) == shown
    assert len(shown) == 80 - (len(shown) < 80)
