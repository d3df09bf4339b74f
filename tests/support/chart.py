"""The chart as Helm renders it."""

import subprocess
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import yaml

from grpo_devcluster.gobuild import binary
from grpo_devcluster.install import CHART

NAMESPACE, RELEASE = "grpo-system", "ops"
Objects = list[dict[str, Any]]


def helm(*arguments: str, command: Sequence[str] = ("template",)) -> subprocess.CompletedProcess[str]:
    """Run a command of Helm on the chart. Skips the test where Helm is not built yet."""
    program = binary("helm")
    if not program.exists():
        pytest.skip("Helm is not built: run `make integration` or `make up` once")
    given = [str(program), *command, RELEASE, str(CHART), "-n", NAMESPACE, *arguments]
    return subprocess.run(given, capture_output=True, text=True, check=False)


@cache
def render(*arguments: str) -> Objects:
    """Return the objects of the chart, which tests share and must not change."""
    done = helm(*arguments)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def of(objects: Objects, kind: str, name: str = RELEASE) -> Objects:
    """Return the objects of a kind with a name, which roles of several namespaces share."""
    return [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
