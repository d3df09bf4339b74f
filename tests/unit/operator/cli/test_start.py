"""``kubectl grpo`` starts without what only other processes, or a few of its commands, need."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from grpo_devcluster.paths import REPO

_MAIN = "grpo_operator.cli.kubectl.main"
_RUN = f"""
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
from {_MAIN} import main
if sys.argv[1:]:
    main()
"""
_KUBECTL = """#!/bin/sh
echo '{"metadata": {"name": "tiny-moe", "namespace": "rl"}, "spec": {"rollout": {}}, "items": []}'
"""


def _imported(*words: str, path: str = "") -> set[str]:
    """Return the modules that a process of its own has imported at the end of a command."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *words], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(REPO / "operator"), "PATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr))


def _of(names: set[str], packages: Sequence[str]) -> list[str]:
    """Return the names of modules of some packages."""
    return sorted(name for name in names if any(f"{name}.".startswith(f"{package}.") for package in packages))


def test_the_commands_themselves_import_no_models_and_no_clients() -> None:
    found = _imported()
    assert _MAIN in found
    assert not _of(found, ("pydantic", "kubernetes", "httpx", "aiohttp", "grpo_operator.plan"))


@pytest.mark.parametrize(
    "words", [["--help"], ["status", "--help"], ["status"], ["status", "tiny-moe"]], ids=" ".join
)
def test_a_command_starts_without_models_and_clients(words: list[str], tmp_path: Path) -> None:
    """Typer reads arguments with pydantic, so that pydantic itself is imported in the end."""
    (tmp_path / "kubectl").write_text(_KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    found = _imported(*words, path=str(tmp_path))
    late = ("kubernetes", "httpx", "aiohttp", "rich.markdown", "grpo_operator.plan")
    assert not _of(found, (*late, "grpo_operator.api.base", "grpo_operator.api.v1alpha1"))
