"""A second release of the operator: an older commit of this repository, with its code, CRDs and chart."""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.gobuild import binary
from grpo_devcluster.operator_process import operator_process
from grpo_devcluster.paths import REPO
from support.api_server import Api, until

# A commit of the day before serving, rollbacks and the lines of engines, with whose images jobs have run.
WITH_PODS = "1db9356840016ebe9adb97eebdfe269b17ce7c29"
# The first commit whose operator keeps what it has accepted and reads what newer ones write, so that
# docs/guides/upgrades.md holds for it. Much has come since: hardened pods, keys of jobs, certificates.
COMMIT = "55bdbfa1ed3dac9fecc391543b5f5ad3d07dbe26"
_PARTS = ("operator", "crds", "helm", "manifests")
_CRDS = ("grpojobs.rl.grpo.dev", "rolloutpools.rl.grpo.dev")


@dataclass(frozen=True)
class Release:
    """A release in a folder ``root`` like this repository's."""

    root: Path

    def manifest(self, name: str) -> dict[str, Any]:
        return dict(yaml.safe_load((self.root / "manifests" / f"{name}.yaml").read_text()))

    def apply_crds(self, api: Api) -> None:
        """Apply the CRDs as the guide of upgrades says, and wait until they are served."""
        api.ok("apply", "--server-side", "--force-conflicts", "-f", str(self.root / "crds"))
        for name in _CRDS:
            until(f"{name} is served", partial(self._is_served, api, name), 60)

    def _is_served(self, api: Api, name: str) -> bool:
        """Return whether the API server publishes the fields of the release's CRD, and no others."""
        wanted = yaml.safe_load((self.root / "crds" / f"{name}.yaml").read_text())["spec"]
        version = wanted["versions"][0]
        path = f"/openapi/v3/apis/{wanted['group']}/{version['name']}"
        schemas = json.loads(api.ok("get", "--raw", path))["components"]["schemas"]
        kind = wanted["names"]["kind"]
        served = [schema for key, schema in schemas.items() if key.endswith(f".{kind}")]
        return [_fields(version["schema"]["openAPIV3Schema"])] == [_fields(schema) for schema in served]

    @contextmanager
    def operator(self, directory: Path, values: Mapping[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
        """Run the release's operator with the settings that its chart makes of ``values``."""
        directory.mkdir(exist_ok=True)
        code = {"PYTHONPATH": str(self.root / "operator")}
        with operator_process(directory, changes=self._settings(directory, values), env=code) as process:
            yield process
            assert process.poll() is None, (directory / "operator.log").read_text()[-2000:]

    def _settings(self, directory: Path, values: Mapping[str, Any]) -> dict[str, Any]:
        given = directory / "values.json"
        given.write_text(json.dumps(values))
        command = [str(binary("helm")), "template", "grpo", str(self.root / "helm" / "grpo-operator")]
        command += ["-n", "default", "-f", str(given), "-s", "templates/settings.yaml"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return dict(json.loads(yaml.safe_load(done.stdout)["data"]["settings.json"]))


PRESENT = Release(REPO)


def install(root: Path) -> None:
    """Build the images of the release in ``root``; install its CRDs and operator in the devcluster."""
    code = (
        "from grpo_devcluster.images import ensure_images\n"
        "from grpo_devcluster.install import devcluster_values, install_operator\n"
        "from grpo_devcluster.paths import KUBECONFIG\n"
        "install_operator(KUBECONFIG, devcluster_values(ensure_images()))\n"
    )
    environment = root / ".venv"
    if not environment.exists():
        environment.symlink_to(Path(sys.prefix))
    command = [sys.executable, "-c", code]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(root / "devcluster")}, cwd=root, check=True)


def unpack(
    target: Path, repository: Path = REPO, commit: str = COMMIT, parts: Sequence[str] = _PARTS
) -> Release:
    """Write the older release, or parts of it, into a folder. Skips the test in a copy without the commit."""
    found = _git(repository, "cat-file", "-e", f"{commit}^{{commit}}")
    if found.returncode:
        reason = found.stderr.decode().strip()
        pytest.skip(f"the older release is commit {commit[:8]}: use a clone with all commits ({reason})")
    archive = _git(repository, "archive", "--format=tar", commit, *parts)
    assert archive.returncode == 0, archive.stderr.decode()
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(target, filter="data")
    return Release(target)


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, check=False)


def _fields(schema: dict[str, Any]) -> set[str]:
    """Return the dotted names of the fields of an object's spec and status."""
    parts = schema.get("properties", {})
    return {f"{top}{path}" for top in ("spec", "status") for path in _paths(parts.get(top, {}))}


def _paths(schema: Any) -> Iterator[str]:
    for name, inner in schema.get("properties", {}).items():
        yield f".{name}"
        yield from (f".{name}{path}" for path in _paths(inner))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _paths(schema[key])
