"""The whole devcluster: up and down."""

import shutil
import subprocess

from grpo_devcluster import addons, controlplane, network, node, processes
from grpo_devcluster.gobuild import build_all
from grpo_devcluster.images import ensure_images
from grpo_devcluster.packages import install_debian, sync_environment
from grpo_devcluster.paths import JOB_DATA, LIB, RUN
from grpo_devcluster.settings import NODE
from grpo_devcluster.stages import stage, wait_for


def prepare_client() -> None:
    """What a demo on the user's own cluster needs: kubectl and helm."""
    with stage("kubectl and helm"):
        build_all(("kubectl", "helm"))


def prepare() -> None:
    """Everything that is installed or built, nothing that runs."""
    with stage("Debian packages"):
        install_debian()
    with stage("Python environment"):
        sync_environment()
    with stage("Kubernetes components"):
        build_all()


def up(with_node: bool = True) -> dict[str, str]:
    """Start a cluster; image references by name. One that runs is completed, not restarted.

    Without a node there is an API server, KubeRay and KWOK: enough for integration tests.
    """
    if processes.names() and not _whole(with_node):
        down()  # left by an unclean end
    images: dict[str, str] = {}
    with stage("network and control plane"):
        network.up()
        controlplane.start()
    if with_node:
        with stage("container images"):
            node.start_containerd()
            images = ensure_images()
        with stage("node"):
            JOB_DATA.mkdir(parents=True, exist_ok=True)
            node.start_kubelet()
            addons.start_coredns()
            wait_for("the node", _node_ready, 120, processes.log_file("kubelet"))
    with stage("KubeRay and KWOK"):
        addons.start_kuberay()
        addons.start_kwok()
    return images


def _whole(with_node: bool) -> bool:
    wanted = {"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"}
    if with_node:
        wanted |= {"containerd", "kubelet", "kube-proxy", "coredns"}
    return all(processes.is_running(name) for name in wanted)


def _node_ready() -> bool:
    path = "{.status.conditions[?(@.type=='Ready')].status}"
    command = ("get", "nodes", NODE, "--ignore-not-found", "-o", f"jsonpath={path}")
    return addons.kubectl(*command) == "True"


def down() -> None:
    """Remove every trace: pods, shims, mounts, namespaces, interfaces, rules, cgroups, files."""
    with stage("stopping the devcluster"):
        for name in ("kubelet", "kuberay-operator", "kwok", "kube-controller-manager"):
            processes.stop(name)
        if processes.is_running("containerd") or (RUN / "containerd.toml").exists():
            node.start_containerd()  # after an unclean end its tasks still need it
            node.remove_tasks()
        for name in processes.names():
            processes.stop(name)
        subprocess.run(["pkill", "-KILL", "-f", f"containerd-shim.*{node.SOCKET}"], check=False)
        network.down()
        node.unmount_all()
        node.remove_cgroups()
        shutil.rmtree(RUN, ignore_errors=True)
        shutil.rmtree(LIB, ignore_errors=True)
