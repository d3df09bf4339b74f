"""Find what a built page would load from other hosts. Links that a reader may follow are no such thing."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

_LOADS = {
    ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src"),
    ("object", "data"), ("embed", "src"), ("link", "href"),
}  # fmt: skip
_NOT_LOADED = {"canonical", "next", "prev", "alternate"}  # relations of links in a page's head
_CSS = re.compile(r"(?:url\(|@import )\s*[\"']?((?:https?:)?//[^\"')\s]+)")


def foreign_requests(site: Path) -> list[str]:
    """Return ``page: address`` for all that pages and style sheets of the folder load from elsewhere."""
    found = []
    for file in sorted(site.rglob("*")):
        if file.suffix in {".html", ".css"}:
            text = file.read_text()
            addresses = [*_CSS.findall(text), *(_of_page(text) if file.suffix == ".html" else ())]
            found += [f"{file.relative_to(site)}: {address}" for address in addresses]
    return found


def _of_page(text: str) -> Iterator[str]:
    parser = _Loads()
    parser.feed(text)
    yield from parser.found


class _Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "link" and _NOT_LOADED & set(values.get("rel", "").split()):
            return
        for name, value in values.items():
            if (tag, name) in _LOADS and re.match(r"(https?:)?//", value):
                self.found.append(value)
