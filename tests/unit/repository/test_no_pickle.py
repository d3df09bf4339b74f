"""The workers load nothing that can run code: no pickle, whatever library it is hidden in.

What torch, Megatron-Core and Ray do inside is not seen here; docs/concepts/security.md names it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_devcluster.paths import REPO

MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
SAFE = {"weights_only": "True", "allow_pickle": "False"}
FILES = sorted((REPO / "worker_images").rglob("*.py"))


def findings(source: str) -> Iterator[str]:
    """Yield what in a source file loads pickles."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            if (node.module or "").split(".")[0] in MODULES or "torch.load" in names:
                yield from names
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            yield "torch.load"
        elif isinstance(node, ast.keyword) and node.arg in SAFE and ast.unparse(node.value) != SAFE[node.arg]:
            yield f"{node.arg}={ast.unparse(node.value)}"


def test_no_worker_loads_a_pickle() -> None:
    assert len(FILES) > 100
    found = {str(file.relative_to(REPO)): names for file in FILES if (names := _found(file))}
    assert found == {}, "keep state with grpo_worker.checkpointing.state_file"


def _found(file: Path) -> list[str]:
    return list(findings(file.read_text()))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle as p", "pickle"),
        ("def f():\n    from dill import loads", "dill.loads"),
        ("from torch import load", "torch.load"),
        ("read = torch.load", "torch.load"),
        ("torch.load(f, weights_only=True)", "torch.load"),
        ("f(weights_only=False)", "weights_only=False"),
        ("f(weights_only=unknown)", "weights_only=unknown"),
        ("np.load(f, allow_pickle=True)", "allow_pickle=True"),
    ],
)
def test_each_way_to_a_pickle_is_found(source: str, found: str) -> None:
    assert found in list(findings(source))


def test_what_loads_no_pickle_is_not_found() -> None:
    lines = [
        "import torch, pickletools",
        "torch.save(1, f)",
        "np.load(f, allow_pickle=False)",
        "file.load(b)",
    ]
    assert list(findings("\n".join(lines))) == []
