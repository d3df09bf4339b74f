"""Errors of ranks that the controller can read: Ray imports their classes there."""

import ast
from pathlib import Path

from grpo_devcluster.paths import REPO

MEGATRON = REPO / "worker_images" / "grpo_worker" / "megatron"


def _error_classes(file: Path) -> list[str]:
    found = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)]
    return [node.name for node in found if node.name.endswith(("Error", "Exception"))]


def test_no_class_of_an_error_needs_megatron() -> None:
    files = sorted(MEGATRON.rglob("*.py"))
    assert len(files) > 20
    assert [name for file in files for name in _error_classes(file)] == [], "see common/rank_errors.py"
