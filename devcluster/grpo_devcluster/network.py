"""Bridge of the node, and the CNI configuration that connects pods to it."""

import json
import subprocess
from pathlib import Path

from grpo_devcluster.paths import RUN
from grpo_devcluster.settings import BRIDGE, FAKE_POD_CIDR, GATEWAY, POD_CIDR
from grpo_devcluster.stages import run

CNI_CONF = RUN / "cni"
CNI_STATE = RUN / "cni-state"
_REMEDY = "The devcluster must run as root, with permission to create network interfaces."


def up() -> None:
    """Create the bridge, to whose address daemons bind, and the CNI configuration."""
    CNI_CONF.mkdir(parents=True, exist_ok=True)
    if not Path(f"/sys/class/net/{BRIDGE}").exists():
        _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("address", "replace", f"{GATEWAY}/24", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    # Without this route, the operator's requests to simulated pods would leave the machine.
    _ip("route", "replace", "unreachable", FAKE_POD_CIDR)
    _sysctl("net/ipv4/ip_forward")
    _sysctl("net/bridge/bridge-nf-call-iptables")
    plugins = [
        {
            "type": "bridge",
            "bridge": BRIDGE,
            "isGateway": True,
            "ipMasq": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": POD_CIDR, "rangeStart": "10.244.0.10"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
                "dataDir": str(CNI_STATE),
            },
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    config = {"cniVersion": "0.4.0", "name": "grpo", "plugins": plugins}
    (CNI_CONF / "10-grpo.conflist").write_text(json.dumps(config))


def down() -> None:
    """Remove the bridge, the route, leftover pod interfaces and every iptables rule of Kubernetes and CNI."""
    for command in (("link", "delete", BRIDGE), ("route", "delete", "unreachable", FAKE_POD_CIDR)):
        subprocess.run(["ip", *command], capture_output=True, check=False)
    for table in ("nat", "filter", "mangle"):
        _remove_rules(table)


def _remove_rules(table: str) -> None:
    saved = subprocess.run(["iptables-save", "-t", table], capture_output=True, text=True, check=False)
    ours = ("KUBE-", "CNI-", POD_CIDR)
    lines = [line for line in saved.stdout.splitlines() if not any(mark in line for mark in ours)]
    if len(lines) < len(saved.stdout.splitlines()):
        text = "\n".join(lines) + "\n"
        subprocess.run(["iptables-restore", "-T", table], input=text, text=True, check=False)


def _ip(*arguments: str) -> None:
    run(["ip", *arguments], step="setting up the pod network", remedy=_REMEDY)


def _sysctl(name: str) -> None:
    path = Path("/proc/sys") / name
    if path.exists():  # some kernels are built without bridge-nf
        path.write_text("1")
