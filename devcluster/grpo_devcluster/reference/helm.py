"""Pages of the Helm chart's values: key, default and the comment above it. Also the chart's own README."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from grpo_devcluster.reference.markdown import table

Row = tuple[str, str, str]  # path of a value, its default, and what it means

_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z]+):(?: (?P<value>.*))?$")
_TITLE = """# Helm values

Values of the chart `helm/grpo-operator`. Set them with `--set KEY=VALUE` or in a file given by `-f`. The file
`values.schema.json` of the chart refuses unknown keys and wrong types. The description of a group applies to
all of its keys.

"""
_README = """# {name}

{description}. The chart installs the operator and its CRDs.
It needs Kubernetes {kubernetes} and [KubeRay](https://github.com/ray-project/kuberay).

    helm install grpo-operator CHART -n grpo-system --create-namespace
    helm test grpo-operator -n grpo-system

`CHART` is the folder or the package of this chart, or its address in an OCI registry. The operator looks
after jobs of its own namespace; set `watchNamespaces` to those of your jobs, or `allNamespaces` to `true`.

## Values

The description of a group applies to all of its keys. Unknown keys and wrong types are refused.

"""


def helm_page(values: Path) -> str:
    """Return the page for the file ``values``."""
    return _TITLE + _table(values)


def chart_readme(chart: Path) -> str:
    """Return the README of the chart in a folder, from its Chart.yaml and values.yaml."""
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    kubernetes = re.sub(r">=(\d+\.\d+).*", r"\1 or later", about["kubeVersion"])
    head = _README.format(name=about["name"], description=about["description"], kubernetes=kubernetes)
    return head + _table(chart / "values.yaml")


def described(schema: dict[str, Any], values: Path) -> dict[str, Any]:
    """Return the schema of the values with their descriptions; others keep those that they have."""
    return _described(schema, "", {path: text for path, _, text in value_rows(values)})


def value_rows(values: Path) -> Iterator[Row]:
    """Yield each value of a file, in its order."""
    groups: list[str] = []  # keys that the current line is nested in
    comments: list[str] = []
    for line in values.read_text().splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comments.append(stripped.removeprefix("#").strip())
        if match := _KEY.match(line):
            del groups[len(match["indent"]) // 2 :]
            path = ".".join([*groups, match["key"]])
            value = (match["value"] or "").strip()
            if not value:
                groups.append(match["key"])
            yield path, value, " ".join(comments)
            comments = []


def _table(values: Path) -> str:
    rows = ((f"`{path}`", f"`{value}`" if value else "", text) for path, value, text in value_rows(values))
    return table(("value", "default", "description"), rows)


def _described(node: dict[str, Any], path: str, texts: dict[str, str]) -> dict[str, Any]:
    found = {"description": texts[path]} if path in texts else {}
    inner = {
        key: _described(value, f"{path}.{key}".lstrip("."), texts)
        for key, value in node.get("properties", {}).items()
    }
    return found | node | found | ({"properties": inner} if inner else {})
