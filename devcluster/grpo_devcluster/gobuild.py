"""Builds Kubernetes components from pinned Go modules; binaries are cached by the content of the pins."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_devcluster.paths import CACHE, PACK, REPO, content_key
from grpo_devcluster.stages import StageError, run, stage

MODULES = REPO / "devcluster" / "modules"
_VERSION = "k8s.io/component-base/version"
_REMEDY = (
    "The build needs Go 1.26 or newer on PATH and a Go module proxy (see `go env GOPROXY`). "
    "Run the command again: finished components are cached."
)


@dataclass(frozen=True, slots=True)
class Component:
    """One binary. ``module``: folder of its pins below ``modules/``. ``package``: its Go package path.

    ``driver``: whether it opens NVIDIA's libraries at run time, which takes cgo.
    """

    name: str
    module: str
    package: str
    driver: bool = False


_K8S = "k8s.io/kubernetes/cmd/"
_CONTAINERD = "github.com/containerd/containerd/v2/cmd/"
_TOOLKIT = "github.com/NVIDIA/nvidia-container-toolkit/cmd/"
_PROMETHEUS_OPERATOR = "github.com/prometheus-operator/prometheus-operator/cmd/operator"
_PLUGIN = "github.com/NVIDIA/k8s-device-plugin/cmd/"
COMPONENTS = {
    c.name: c
    for c in (
        *(
            Component(name, "kubernetes", _K8S + name)
            for name in (
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kubelet",
                "kubectl",
                "kube-proxy",
            )
        ),
        Component("etcd", "etcd", "go.etcd.io/etcd/server/v3"),
        Component("coredns", "coredns", "github.com/coredns/coredns"),
        Component("kuberay-operator", "kuberay", "github.com/ray-project/kuberay/ray-operator"),
        Component("kuberay-operator-1.5", "kuberay-1.5", "github.com/ray-project/kuberay/ray-operator"),
        *(
            Component(name, "prometheus", f"github.com/prometheus/prometheus/cmd/{name}")
            for name in ("prometheus", "promtool")
        ),
        Component("prometheus-operator", "prometheus-operator", _PROMETHEUS_OPERATOR),
        Component("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok"),
        Component("helm", "helm", "helm.sh/helm/v4/cmd/helm"),
        Component("registry", "registry", "github.com/google/go-containerregistry/cmd/registry"),
        Component("actionlint", "actionlint", "github.com/rhysd/actionlint/cmd/actionlint"),
        Component("krew", "krew", "sigs.k8s.io/krew/cmd/krew"),
        Component("glua", "gopher-lua", "github.com/yuin/gopher-lua/cmd/glua"),
        Component("versitygw", "versitygw", "github.com/versity/versitygw/cmd/versitygw"),
        Component("fake-gcs-server", "fake-gcs-server", "github.com/fsouza/fake-gcs-server"),
        *(
            Component(name, "containerd", _CONTAINERD + name)
            for name in ("containerd", "containerd-shim-runc-v2", "ctr")
        ),
        Component("nvidia-device-plugin", "k8s-device-plugin", _PLUGIN + "nvidia-device-plugin", driver=True),
        *(
            Component(name, "nvidia-container-toolkit", _TOOLKIT + name, driver=True)
            for name in ("nvidia-ctk", "nvidia-cdi-hook", "nvidia-container-runtime")
        ),
    )
}
NODE = (
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"),
    *("kubelet", "kube-proxy", "kubectl", "coredns"),
)
DEFAULT = (*NODE, "kuberay-operator", "kwok", "helm")
# Debian's containerd knows no CDI in pods, see docs/adr/0018.
GPUS = (
    *("containerd", "containerd-shim-runc-v2", "ctr"),
    *("nvidia-device-plugin", "nvidia-ctk", "nvidia-cdi-hook", "nvidia-container-runtime"),
)
GPU_NODE = (*NODE, *GPUS)


def _flags(component: Component) -> list[str]:
    """Return build flags; Kubernetes binaries get the version of their module, which clients check."""
    link = "-s -w"
    if component.module == "kubernetes":
        pins = (MODULES / component.module / "go.mod").read_text().split()
        version = pins[pins.index("k8s.io/kubernetes") + 1]
        major, minor, _ = version.removeprefix("v").split(".")
        link += f" -X {_VERSION}.gitVersion={version} -X {_VERSION}.gitMajor={major}"
        link += f" -X {_VERSION}.gitMinor={minor}"
    if component.driver:  # symbols of libraries that only a machine with GPUs has
        link += " '-extldflags=-Wl,-z,lazy'"
    return ["-trimpath", f"-ldflags={link}"]


def binary(name: str) -> Path:
    """Return the path of a component in the cache, where ``build_all`` builds it, or in the pack."""
    component = COMPONENTS[name]
    pins = MODULES / component.module
    build = " ".join([component.package, *_flags(component)])
    key = content_key((pins / "go.mod").read_bytes(), (pins / "go.sum").read_bytes(), build.encode())
    return (PACK or CACHE) / "bin" / f"{name}-{key}"


def available(name: str) -> bool:
    """Return whether a component can be had: by a build, or because the pack has it."""
    return PACK is None or binary(name).exists()


def everything_built() -> bool:
    """Return whether the cache has all default components."""
    return all(binary(name).exists() for name in DEFAULT)


def link_tools(names: Sequence[str], folder: Path) -> Path:
    """Return a folder in which components have their plain names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(binary(name))
    return folder


def build_all(names: Sequence[str] = DEFAULT) -> None:
    """Build the named components that are missing in the cache, with a progress line for each."""
    missing = [COMPONENTS[name] for name in names if not binary(name).exists()]
    if missing and PACK is not None:
        raise StageError(
            f"GRPO_DEVCLUSTER_PACK={PACK} lacks {', '.join(c.name for c in missing)} as pinned in this "
            "checkout. Run `make gpu-node-pack` in the same checkout and bring the pieces of all calls."
        )
    if missing and shutil.which("go") is None:
        raise StageError(f"go is not on PATH. {_REMEDY}")
    for number, component in enumerate(missing, 1):
        with stage(f"building {component.name} ({number}/{len(missing)})"):
            _build(component)


def _build(component: Component) -> None:
    target = binary(component.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".building")
    run(
        ["go", "build", *_flags(component), "-o", temporary, component.package],
        step=f"building {component.name} from {component.package}",
        remedy=_REMEDY,
        env=_environment(cgo=component.driver),
        cwd=MODULES / component.module,
    )
    temporary.rename(target)


def _environment(*, cgo: bool = False) -> dict[str, str]:
    return {
        "CGO_ENABLED": "1" if cgo else "0",
        "CGO_LDFLAGS_ALLOW": "-Wl,--unresolved-symbols=ignore-in-object-files",
        "GOCACHE": str(CACHE / "go-build"),
        "GOMODCACHE": str(CACHE / "go-mod"),
        "GOFLAGS": "-buildvcs=false -modcacherw",
    }


def module_directory(module: str, path: str) -> Path:
    """Return the source folder of a pinned module, for the CRDs and KWOK stages in it."""
    if PACK is not None:
        return PACK / "sources" / module
    output = run(
        ["go", "mod", "download", "-json", path],
        step=f"locating the sources of {path}",
        remedy=_REMEDY,
        env=_environment(),
        cwd=MODULES / module,
    )
    return Path(json.loads(output)["Dir"])
