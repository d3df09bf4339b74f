"""Page of the versions that the project works with, from the pins of its parts."""

import re
import tomllib
from pathlib import Path

from grpo_devcluster.image_locks import read_bases
from grpo_devcluster.packages import MEGATRON_NEXT
from grpo_devcluster.reference.markdown import table

_HEAD = """# Supported versions

What the cluster and the images need, and what the tests run. Versions between or beside these probably work,
but no test has shown it; [limits](../limits.md) say what was not run at all.

## Cluster

{cluster}
RDMA, gang schedulers and Kueue: [limits](../limits.md#cluster-software).

## Images

{images}
Trainers and engines of a job must have the same Ray and minor version of Megatron-Core:
see [upgrades](../guides/upgrades.md#images-of-a-job). The bases are those that the Dockerfiles name; which of
their packages have been verified is in [`bases.yaml`](../../images/bases.yaml).

## Releases

Fixes are made for the latest release ([security policy](../../SECURITY.md)). The API is
`rl.grpo.dev/v1alpha1`: [versions of the API](../guides/upgrades.md#versions-of-the-api).
"""


def support_page(repository: Path) -> str:
    """Return the page for a checkout."""
    return _HEAD.format(cluster=_cluster(repository), images=_images(repository))


def _cluster(repository: Path) -> str:
    chart = (repository / "helm/grpo-operator/Chart.yaml").read_text()
    (minimum,) = re.findall(r'^kubeVersion: ">=(\d+\.\d+)\.', chart, re.MULTILINE)

    def pinned(module: str, path: str) -> str:
        text = (repository / "devcluster/modules" / module / "go.mod").read_text()
        return _only(text, rf"^(?:require )?\t?{re.escape(path)} v(\S+)", f"{module}: {path}")

    kuberay = "github.com/ray-project/kuberay/ray-operator"
    older, newer = pinned("kuberay-1.5", kuberay), pinned("kuberay", kuberay)
    stack = "github.com/prometheus-operator/prometheus-operator"
    rows = (
        ("Kubernetes", f"{minimum} or later", pinned("kubernetes", "k8s.io/kubernetes")),
        ("KubeRay", f"{older}, or {newer.rpartition('.')[0]}", f"{newer}; {older} in `make slow`"),
        ("Helm", "any that installs charts of version 2", pinned("helm", "helm.sh/helm/v4")),
        ("Prometheus operator", "optional", pinned("prometheus-operator", stack)),
        ("containerd", "any with CDI for GPUs", pinned("containerd", "github.com/containerd/containerd/v2")),
        (
            "NVIDIA device plugin",
            "any; GPUs only",
            pinned("k8s-device-plugin", "github.com/NVIDIA/k8s-device-plugin"),
        ),
    )
    return table(("part", "needed", "run by the tests"), rows)


def _images(repository: Path) -> str:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(p for extra in project["optional-dependencies"].values() for p in extra),
    ]
    lock = tomllib.loads((repository / "uv.lock").read_text())["package"]
    locked = {package["name"]: package.get("version", "") for package in lock}
    next_megatron = MEGATRON_NEXT.partition("==")[2]
    rows = [("Python", f"`{project['requires-python']}`", "3.11, and 3.12 in `make test-megatron-next`")]
    for title, name in _PACKAGES.items():
        asked = _only("\n".join(wanted), rf"^{re.escape(name)}(?:\[\w+\])?((?:[<>=!~].*)?)$", name)
        also = f", and {next_megatron} in `make test-megatron-next`" if name in MEGATRON_NEXT else ""
        rows.append((title, f"`{asked}`", locked[name] + also))
    bases = [
        (f"base of the {base.name}'s image", f"`{base.image}`", "a Debian with the locked packages instead")
        for base in read_bases(repository).values()
    ]
    return table(("part", "needed", "run by the tests"), [*rows, *bases])


_PACKAGES = {
    "PyTorch": "torch",
    "Megatron-Core": "megatron-core",
    "Ray": "ray",
    "SGLang": "sglang",
    "transformers": "transformers",
    "NIXL": "nixl-cu13",
}


def _only(text: str, pattern: str, name: str) -> str:
    found = re.findall(pattern, text, re.MULTILINE)
    if len(found) != 1:
        raise ValueError(f"{name} is pinned {len(found)} times, expected once")
    return str(found[0])
