"""The attacks on the sandbox of programs, inside a container of a pod."""

import json
from pathlib import Path

from grpo_devcluster.addons import kubectl
from grpo_devcluster.follow import JobView
from support.attacks import ATTACKS

_MODULES = ("__init__", "attack_driver", "attack_targets", "attacks", "call_filter")
_PLACE = "/tmp/attacks"
_UNPACK = """
import json, os, sys
for name, text in json.load(sys.stdin).items():
    os.makedirs(os.path.dirname(name), exist_ok=True)
    open(name, "w").write(text)
"""
_RUN = f'PYTHONPATH={_PLACE}:$PYTHONPATH exec python3 -m support.attack_driver "$@"'
# Prints what of the boundary the kernel and the container's runtime permit.
_OFFER = """
import json
from grpo_worker.rewards.programs.landlock import landlock_version
from grpo_worker.rewards.programs.namespaces import enter_namespaces
print(json.dumps({"landlock": landlock_version() > 0, "namespaces": enter_namespaces()}))
"""


def attack(job: JobView, pod: str, container: str) -> dict[str, tuple[bool, bool]]:
    """Run all attacks; return which of them succeed without the sandbox, and which in it."""
    folder = Path(__file__).parent
    files = {f"{_PLACE}/support/{name}.py": (folder / f"{name}.py").read_text() for name in _MODULES}
    into = ("-n", job.namespace, "exec", "-i", pod, "-c", container, "--", "python3", "-c", _UNPACK)
    kubectl(*into, stdin=json.dumps(files), kubeconfig=job.kubeconfig)
    printed = job.exec(pod, container, "/bin/bash", "-c", _RUN, "attacks", *ATTACKS)
    return {name: (plain, confined) for name, (plain, confined) in json.loads(printed).items()}


def offer(job: JobView, pod: str, container: str) -> dict[str, bool]:
    """Return which parts of the boundary a process in the container may use."""
    return dict(json.loads(job.exec(pod, container, "python3", "-c", _OFFER)))
