"""A server-side apply is sent as JSON and read as YAML."""

import json

import yaml
from hypothesis import given
from hypothesis import strategies as st

from grpo_operator.kuberay_client.apply_body import apply_body


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_yaml_and_json_read_the_same(text: str) -> None:
    body = apply_body({"message": text})
    assert yaml.safe_load(body) == json.loads(body) == {"message": text}


def test_characters_beyond_the_first_plane_are_not_escaped() -> None:
    assert apply_body({"message": "\U0001f680"}) == '{"message": "\U0001f680"}'
    assert apply_body({"message": "a\x85\u2028\x7f\\u2028"}) == r'{"message": "a\u0085\u2028\u007f\\u2028"}'


def test_a_half_of_a_character_is_replaced() -> None:
    assert json.loads(apply_body({"message": "a\ud83d"})) == {"message": "a\ufffd"}
