"""The file of a page: no text can leave its element, and only the page's own script runs."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_worker.run_page.html import embedded, page, policy


class _Scripts(HTMLParser):
    """Contents of the script elements, with their attributes, as a browser finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, Any], str]] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.found.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and self.found:
            kind, text = self.found[-1]
            self.found[-1] = (kind, text + data)


HOSTILE = st.one_of(
    st.text(),
    st.sampled_from(
        ["</script>", "<!--<script>", "]]>", "%%script%%", "%%data%%", "\u2028", "\ud83d", "&lt;"]
    ),
)


@given(st.dictionaries(HOSTILE, HOSTILE, max_size=3), HOSTILE)
def test_all_text_comes_back_from_the_page_and_nothing_else_is_in_it(
    texts: dict[str, str], name: str
) -> None:
    data = {"job": name, "texts": texts}
    made = page(data, live=False).encode().decode()
    parser = _Scripts()
    parser.feed(made)
    (kind, text), (_, script) = parser.found
    assert kind == {"type": "application/json", "id": "data"}
    expected = json.loads(json.dumps(data, ensure_ascii=False).encode("utf-8", "replace"))
    assert json.loads(text) == expected | {"live": False}
    assert set(parser.tags) & {"img", "svg", "iframe", "link", "object"} == set()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#x27;sha256-{digest}&#x27;" in made, "the policy admits exactly this script"


def test_numbers_that_json_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        embedded({"value": float("nan")})


def test_only_a_live_page_may_ask_and_only_its_own_server() -> None:
    assert "connect-src 'self'" in policy(live=True) and "connect-src 'none'" in policy(live=False)
    for live in (True, False):
        assert policy(live).startswith("default-src 'none'; ")
        assert not re.search(r"unsafe|\*|https?:", policy(live))
