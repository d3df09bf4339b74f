"""The bridge of the node, and the CNI configuration that puts pods on it."""

import json
import subprocess
from pathlib import Path

from grpo_devcluster.paths import RUN
from grpo_devcluster.settings import BRIDGE, FAKE_POD_CIDR, GATEWAY, POD_CIDR
from grpo_devcluster.stages import run

CNI_CONF = RUN / "cni"
CNI_STATE = RUN / "cni-state"
_REMEDY = "The devcluster must run as root with the right to make network interfaces."


def up() -> None:
    """Create the bridge (before the first pod: daemons bind to its address) and the CNI conf."""
    CNI_CONF.mkdir(parents=True, exist_ok=True)
    if not Path(f"/sys/class/net/{BRIDGE}").exists():
        _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("address", "replace", f"{GATEWAY}/24", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    # Else what the operator asks such pods would leave the machine.
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
    for what in (("link", "delete", BRIDGE), ("route", "delete", "unreachable", FAKE_POD_CIDR)):
        subprocess.run(["ip", *what], capture_output=True, check=False)
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
    if path.exists():  # bridge-nf is absent where the kernel has it built differently
        path.write_text("1")
