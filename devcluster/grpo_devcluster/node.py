"""The node: containerd, kubelet and kube-proxy."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

from grpo_devcluster import network, nvidia, processes
from grpo_devcluster.certs import PKI
from grpo_devcluster.gobuild import binary
from grpo_devcluster.paths import CACHE, LIB, PACK, RUN
from grpo_devcluster.settings import GATEWAY, NODE, POD_CIDR
from grpo_devcluster.stages import wait_for

SOCKET = RUN / "containerd.sock"
CONTAINERD_STATE = RUN / "containerd"
CONTAINERD_ROOT = CACHE / "containerd"  # kept by ``down``, so that images stay imported
PAUSE_IMAGE = "localhost/grpo-pause:dev"
CNI_PLUGINS = (PACK / "debian" if PACK else Path("/")) / "usr/lib/cni"

_CONTAINERD = f"""\
version = 2
root = "{CONTAINERD_ROOT}"
state = "{CONTAINERD_STATE}"
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # Without CAP_SYS_RESOURCE runc cannot lower oom_score_adj, and sandboxes would fail to start.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{network.CNI_CONF}"
"""


def start_containerd() -> None:
    """Start containerd with its own configuration, root and socket; on GPUs with NVIDIA's runtime too."""
    RUN.mkdir(parents=True, exist_ok=True)
    gpus = nvidia.present()
    env = nvidia.containerd_environment() if gpus else {}
    config = RUN / "containerd.toml"
    config.write_text(_CONTAINERD + (nvidia.containerd_runtimes() if gpus else ""))
    processes.start("containerd", ["containerd", "--config", config, "--log-level", "warn"], env)
    wait_for("containerd", lambda: ctr("version")[0] == 0, 30, processes.log_file("containerd"))


def ctr(*arguments: str) -> tuple[int, str]:
    """Run ctr in containerd's namespace k8s.io and return (exit code, output)."""
    command = ["ctr", "--address", str(SOCKET), "--namespace", "k8s.io", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def start_kubelet() -> None:
    """Start kubelet and kube-proxy."""
    (LIB / "kubelet").mkdir(parents=True, exist_ok=True)
    config = RUN / "kubelet.json"
    config.write_text(json.dumps(_kubelet_config()))
    processes.start(
        "kubelet",
        [
            binary("kubelet"),
            f"--config={config}",
            f"--kubeconfig={RUN / 'kubelet.kubeconfig'}",
            f"--hostname-override={NODE}",
            f"--node-ip={GATEWAY}",
            f"--root-dir={LIB / 'kubelet'}",
            f"--cert-dir={LIB / 'kubelet-pki'}",
            "--v=1",
        ],
    )
    proxy = RUN / "kube-proxy.json"
    proxy.write_text(json.dumps(_proxy_config()))
    processes.start("kube-proxy", [binary("kube-proxy"), f"--config={proxy}", f"--hostname-override={NODE}"])


def _kubelet_config() -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(PKI / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(PKI / "kubelet-server.crt"),
        "tlsPrivateKeyFile": str(PKI / "kubelet-server.key"),
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": "/",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [GATEWAY],
        "clusterDomain": "cluster.local",
        "resolvConf": "/etc/resolv.conf",
        "podCIDR": POD_CIDR,
        "maxPods": 200,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,  # images are imported once, there is no registry
        "syncFrequency": "5s",
        "nodeStatusUpdateFrequency": "4s",
    }


def _proxy_config() -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clusterCIDR": POD_CIDR,
        "clientConnection": {"kubeconfig": str(RUN / "proxy.kubeconfig")},
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "iptables": {"minSyncPeriod": "0s", "syncPeriod": "30s"},
    }


def remove_tasks() -> None:
    """Delete every container that kubelet left behind, and kill the shims."""
    code, output = ctr("containers", "list", "-q")
    for container in output.split() if code == 0 else []:
        ctr("task", "kill", "--signal", "SIGKILL", container)
        ctr("task", "delete", "--force", container)
        ctr("container", "delete", container)
    kill_shims()


def kill_shims() -> None:
    """Kill the shims of this containerd, which outlive it."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process is gone
            command = path.read_bytes().decode(errors="replace").split("\0")
            if "containerd-shim" in command[0] and str(SOCKET) in command:
                os.kill(int(path.parent.name), signal.SIGKILL)


def unmount_all() -> None:
    """Unmount everything below the devcluster's folders, deepest first, and delete network namespaces."""
    roots = (str(RUN), str(LIB), "/run/netns/cni-", "/var/run/netns/cni-")
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in sorted((p for p in points if p.startswith(roots)), key=len, reverse=True):
        subprocess.run(["umount", "--lazy", point], capture_output=True, check=False)
    for namespace in Path("/run/netns").glob("cni-*"):
        with contextlib.suppress(OSError):  # `ip netns add` has mounted something over the folder
            namespace.unlink()


def remove_cgroups() -> None:
    """Remove the pods' empty cgroups."""
    base = Path("/sys/fs/cgroup")
    for top in (*base.glob("kubepods*"), *base.glob("*/kubepods*")):
        for directory in sorted(top.rglob("*"), key=lambda p: len(p.parts), reverse=True):
            if directory.is_dir():
                _rmdir(directory)
        _rmdir(top)


def _rmdir(path: Path) -> None:
    with contextlib.suppress(OSError):  # fails while the cgroup is in use
        path.rmdir()
