"""Links of the site's pages to files of the repository that are no pages of ``docs``.

The site has a copy of each such file below ``files/``, so that its links lead to the version that they were
written for, without another host. Sources become pages, folders become lists, Markdown stays Markdown;
images and JSON are copied as they are.
"""

import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

DOCS = "docs"
FILES = "files"
_COPIED = {".json", ".png", ".svg"}
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->\n*", re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
_HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"  # from the search
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".toml": "toml"}


def site_path(repo: Path, path: str) -> str:
    """Return the source path in the site of a file or folder of the repository."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    if (repo / path).is_dir():
        return f"{FILES}/{path}/index.md"
    return f"{FILES}/{path}" + ("" if Path(path).suffix in _COPIED | {".md"} else ".md")


def is_copied(path: str) -> bool:
    """Return whether the file is no page of the site, but offered as it is."""
    return Path(path).suffix in _COPIED


def rewritten(repo: Path, path: str, text: str) -> str:
    """Return the Markdown of the repository's file ``path`` with the site's links and without comments."""
    folder = posixpath.dirname(site_path(repo, path))
    return _outside_code(
        text, lambda part: _linked(repo, posixpath.dirname(path), folder, _COMMENT.sub(_no_comment, part))
    )


def outside(repo: Path) -> list[str]:
    """Return the files and folders outside ``docs`` that pages link to, or that those link to, sorted."""
    found: set[str] = set()
    following = [page.relative_to(repo).as_posix() for page in (repo / DOCS).rglob("*.md")]
    while following:
        path = following.pop()
        new = {target for target in _targets(repo, path) if not target.startswith(f"{DOCS}/")} - found
        found |= new
        following += new
    return sorted(found)


def page_of(repo: Path, path: str) -> str:
    """Return the Markdown of the site's page for a source or folder outside ``docs``."""
    if (repo / path).is_dir():
        items = "".join(f"- [{name}]({path}/{name})\n" for name in _names(repo / path))
        return _HIDDEN + _linked(repo, "", posixpath.dirname(site_path(repo, path)), f"# {path}/\n\n{items}")
    text = (repo / path).read_text()
    if path.endswith(".md"):
        return _HIDDEN + rewritten(repo, path, text)
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return f"{_HIDDEN}# {path}\n\n~~~~~~{language}\n{text.rstrip()}\n~~~~~~\n"


def _targets(repo: Path, path: str) -> Iterator[str]:
    file = repo / path
    if file.is_dir():
        yield from (f"{path}/{name}" for name in _names(file))
    elif path.endswith(".md"):
        links = _LINK.findall(_CODE.sub("", file.read_text()))
        yield from filter(None, (_target(repo, posixpath.dirname(path), link) for link in links))


def _linked(repo: Path, folder: str, site_folder: str, text: str) -> str:
    """Return a text of the repository's ``folder`` with the links of the site's ``site_folder``."""

    def link(match: re.Match[str]) -> str:
        target = _target(repo, folder, match[1])
        return match[1] if target is None else posixpath.relpath(site_path(repo, target), site_folder)

    return _LINK.sub(link, text)


def _target(repo: Path, folder: str, link: str) -> str | None:
    """Return what a link from ``folder`` leads to in the repository, or None if it leads elsewhere."""
    if "://" in link or link.startswith("mailto:"):
        return None
    target = posixpath.normpath(posixpath.join(folder, link))
    return target if not target.startswith("..") and (repo / target).exists() else None


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_file())


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    parts = _CODE.split(text)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def _no_comment(match: re.Match[str]) -> str:
    """Keep the line break after a comment that ends a line of text."""
    starts_line = match.start() == 0 or match.string[match.start() - 1] == "\n"
    return "" if starts_line else match[0].rpartition("-->")[2]
