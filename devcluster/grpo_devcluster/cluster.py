"""Starts and stops the whole devcluster."""

import shutil

from grpo_devcluster import addons, controlplane, network, node, nvidia, processes
from grpo_devcluster.gobuild import DEFAULT, GPU_NODE, GPUS, available, build_all
from grpo_devcluster.images import ensure_images
from grpo_devcluster.packages import install_debian, sync_environment, use_packed_tools
from grpo_devcluster.paths import JOB_DATA, LIB, PACK, RUN, SOCKETS
from grpo_devcluster.pod_overlay import KERNELS
from grpo_devcluster.settings import NODE
from grpo_devcluster.stages import stage, wait_for


def prepare_client() -> None:
    """Build what a demo on the user's own cluster needs: kubectl and helm."""
    with stage("kubectl and helm"):
        build_all(("kubectl", "helm"))


def prepare() -> None:
    """Install and build everything; start nothing."""
    with stage("Debian packages"):
        install_debian()
    with stage("Python environment"):
        sync_environment()
    with stage("Kubernetes components"):
        build_all(_components())
    nvidia.use_tools()


def _components() -> tuple[str, ...]:
    if PACK is not None:
        return GPU_NODE
    return (*DEFAULT, *GPUS) if nvidia.present() else DEFAULT


def up(with_node: bool = True) -> dict[str, str]:
    """Start a cluster and return the image references by name. A running cluster is not restarted.

    Without a node, only the API server, KubeRay and KWOK run, which is enough for integration tests.
    """
    if processes.names() and not _complete(with_node):
        down()  # remains of a cluster that was not stopped properly
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
            if nvidia.present():
                KERNELS.mkdir(parents=True, exist_ok=True)
                KERNELS.chmod(0o1777)  # pods write to it, which are not root
            node.start_kubelet()
            addons.start_coredns()
            wait_for("the node", _node_ready, 120, processes.log_file("kubelet"))
    if with_node and nvidia.present():
        with stage("GPUs"):
            nvidia.start()
    with stage("KubeRay and KWOK"):
        if available("kuberay-operator"):
            addons.start_kuberay()
        if available("kwok"):
            addons.start_kwok()
    return images


def _complete(with_node: bool) -> bool:
    daemons = {"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"}
    if with_node:
        daemons |= {"containerd", "kubelet", "kube-proxy", "coredns"}
    return all(processes.is_running(name) for name in daemons)


def _node_ready() -> bool:
    path = "{.status.conditions[?(@.type=='Ready')].status}"
    command = ("get", "nodes", NODE, "--ignore-not-found", "-o", f"jsonpath={path}")
    return addons.kubectl(*command) == "True"


def down() -> None:
    """Remove everything: pods, shims, mounts, namespaces, interfaces, rules, cgroups, files."""
    use_packed_tools()
    nvidia.use_tools()
    with stage("stopping the devcluster"):
        for name in ("kubelet", "kuberay-operator", "kwok", "kube-controller-manager"):
            processes.stop(name)
        if processes.is_running("containerd") or (RUN / "containerd.toml").exists():
            node.start_containerd()  # removing leftover tasks needs a running containerd
            node.remove_tasks()
        for name in processes.names():
            processes.stop(name)
        node.kill_shims()
        nvidia.down()
        network.down()
        node.unmount_all()
        node.remove_cgroups()
        shutil.rmtree(RUN, ignore_errors=True)
        shutil.rmtree(LIB, ignore_errors=True)
        shutil.rmtree(SOCKETS, ignore_errors=True)
