"""Page of the Helm chart's values: key, default and the comment above it."""

import re
from collections.abc import Iterator
from pathlib import Path

from grpo_devcluster.reference.markdown import table

_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z]+):(?: (?P<value>.*))?$")
_TITLE = """# Helm values

Values of the chart `helm/grpo-operator`. Set them with `--set KEY=VALUE` or in a file given by `-f`. The file
`values.schema.json` of the chart refuses unknown keys and wrong types. The description of a group applies to
all of its keys.

"""


def helm_page(values: Path) -> str:
    """Return the page for the file ``values``."""
    return _TITLE + table(("value", "default", "description"), _rows(values.read_text().splitlines()))


def _rows(lines: list[str]) -> Iterator[tuple[str, str, str]]:
    groups: list[str] = []  # keys that the current line is nested in
    comments: list[str] = []
    for line in lines:
        stripped = line.strip()
        if stripped.startswith("#"):
            comments.append(stripped.removeprefix("#").strip())
        if match := _KEY.match(line):
            del groups[len(match["indent"]) // 2 :]
            path = ".".join([*groups, match["key"]])
            value = (match["value"] or "").strip()
            if not value:
                groups.append(match["key"])
            yield f"`{path}`", f"`{value}`" if value else "", " ".join(comments)
            comments = []
