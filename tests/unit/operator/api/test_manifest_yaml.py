"""Manifests are read as kubectl reads them."""

from typing import Any

import pytest

from grpo_operator.api.manifest_yaml import dump, load, load_all


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1E-6", 1e-6), ("-2.5e+3", -2500), (".5e1", 5), ("1.0e-06", 1e-6), ("2", 2),
        ("2.0", 2), ("0.5", 0.5), ("'1e-6'", "1e-6"), ("1e", "1e"), ("e5", "e5"), ("v1e5", "v1e5"),
        ("1.2.3", "1.2.3"), ("true", True), ("~", None),
    ],
)  # fmt: skip
def test_a_scalar_has_the_type_that_kubectl_sends(text: str, value: Any) -> None:
    read = load(text)
    assert read == value and type(read) is type(value)


def test_documents_are_read_one_after_the_other() -> None:
    assert list(load_all("a: 1e-3\n---\nb: 2\n")) == [{"a": 0.001}, {"b": 2}]


@pytest.mark.parametrize(
    "value", ["12e4567", "1e-6", "2", "true", "0x1f", "plain", 1e-6, 5e-07, 2, True, None]
)
def test_what_is_written_is_read_again(value: Any) -> None:
    text = dump({"labels": {"commit": value}})
    assert load(text) == {"labels": {"commit": value}}
    assert ("'" in text) == (isinstance(value, str) and value != "plain")
