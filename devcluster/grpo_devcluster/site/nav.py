"""Navigation of the site: the sections of ``docs/index.md``, each with the pages that it links to."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

INDEX = "index.md"
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s#]+\.md)(?:#[^)]*)?\)")
_LISTS = ("adr/index.md",)  # pages whose links belong below them in the navigation
Entry = dict[str, list[str]]


def navigation(docs: Path) -> list[Entry]:
    """Return MkDocs' ``nav`` for the pages of the folder ``docs``; titles are the pages' own.

    Raises ValueError for pages that it would leave out: link them from the index.
    """
    sections = _SECTION.split((docs / INDEX).read_text())
    entries: list[Entry] = [{"Home": [INDEX]}]
    seen = {INDEX}
    for title, text in zip(sections[1::2], sections[2::2], strict=True):
        pages = [page for page in dict.fromkeys(_pages(docs, text)) if page not in seen]
        seen.update(pages)
        if pages:
            entries.append({title: pages})
    missing = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")} - seen
    if missing:
        raise ValueError(f"docs/index.md links to no page of {sorted(missing)}: add them to a section")
    return entries


def _pages(docs: Path, text: str, folder: str = ".") -> Iterator[str]:
    """Yield the pages of ``docs`` that a text in ``folder`` links to, with those of lists among them."""
    for link in _LINK.findall(text):
        path = (docs / folder / link).resolve()
        if path.is_relative_to(docs.resolve()) and path.is_file():
            page = path.relative_to(docs.resolve()).as_posix()
            yield page
            if page in _LISTS:
                yield from _pages(docs, path.read_text(), str(PurePosixPath(page).parent))
