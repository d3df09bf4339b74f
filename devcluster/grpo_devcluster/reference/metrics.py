"""Page of the Prometheus metrics, read from the calls that define them."""

import ast
from collections.abc import Iterator
from pathlib import Path

from grpo_devcluster.paths import REPO
from grpo_devcluster.reference.markdown import called, strings, table

_TYPES = {
    "Counter": "counter",
    "Gauge": "gauge",
    "Histogram": "histogram",
    "CounterMetricFamily": "counter",
    "GaugeMetricFamily": "gauge",
}
_SECTIONS = (
    ("Operator", "Port 9090 of the operator's pod, path `/metrics`.", "operator/grpo_operator"),
    (
        "Controller of a job",
        "Port 8090 of the controller pod, path `/metrics`. `grpo_metric` has one series for each training "
        "metric: the label `name` is the name in `metrics.jsonl`.",
        "worker_images/grpo_worker/metrics",
    ),
    (
        "Agent of an engine",
        "Port 9000 of each engine pod, path `/metrics`.",
        "worker_images/grpo_worker/weightsync",
    ),
    (
        "GPUs",
        "Port 9000 of each pod that has GPUs (trainers and engines), path `/metrics`. `gpu` is the UUID. "
        "What a GPU or driver does not support is left out.",
        "worker_images/grpo_worker/gpu_health",
    ),
)


def metrics_page() -> str:
    """Return the page with one table for each process that exports metrics."""
    parts = ["# Metrics\n\nWhat the values mean for a job: [observability](../guides/observability.md).\n"]
    for title, text, folder in _SECTIONS:
        rows = sorted(row for file in (REPO / folder).rglob("*.py") for row in _defined(file))
        parts.append(f"\n## {title}\n\n{text}\n\n" + table(("metric", "type", "labels", "help"), rows))
    return "".join(parts)


def _defined(file: Path) -> Iterator[tuple[str, str, str, str]]:
    tree = ast.parse(file.read_text())
    lists = dict(_lists(tree))
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and called(call) in _TYPES and len(call.args) >= 2:
            name, text = (strings(argument) for argument in call.args[:2])
            if name and text and name[0].startswith("grpo_"):
                kind = called(call)
                suffix = "_total" if kind == "CounterMetricFamily" else ""
                labels = ", ".join(f"`{label}`" for label in _labels(call, lists))
                yield f"`{name[0]}{suffix}`", _TYPES[kind], labels, text[0]


def _labels(call: ast.Call, lists: dict[str, list[str]]) -> list[str]:
    given = next((k.value for k in call.keywords if k.arg == "labels"), None)
    node = given or (call.args[2] if len(call.args) > 2 else None)
    return _items(node, lists) if node else []


def _lists(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield the module's constants that are lists of strings."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, _items(node.value, {})


def _items(node: ast.AST, lists: dict[str, list[str]]) -> list[str]:
    if isinstance(node, ast.Name):
        return lists.get(node.id, [])
    if isinstance(node, ast.Starred):
        return _items(node.value, lists)
    if isinstance(node, ast.List):
        return [text for item in node.elts for text in strings(item) or _items(item, lists)]
    return []
