"""Files of a job, read in the pod of its controller."""

import json
from dataclasses import dataclass
from typing import Any

from grpo_operator.api.names import job_store, writer
from grpo_operator.cli.kubectl.cluster import Cluster, KubectlError


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The folder of a job, and the running pod that has it mounted."""

    cluster: Cluster
    pod: str
    folder: str

    @classmethod
    def of(cls, cluster: Cluster, job: str, wanted: str) -> "JobFiles":
        """Find the controller of a job. ``wanted``: what is to be read, for the message.

        Raises KubectlError that names the folder when no controller runs.
        """
        found = cluster.job(job)
        folder = job_store(found["metadata"]["namespace"], writer(found))
        pods = cluster.items("pods", "-l", f"rl.grpo.dev/job={job},rl.grpo.dev/pool=controller")
        running = [p["metadata"]["name"] for p in pods if p["status"].get("phase") == "Running"]
        if not running:
            raise KubectlError(f"{job} has no running controller: its {wanted} are in {folder} of the store")
        return cls(cluster, running[0], folder)

    def lines(self, *command: str) -> list[dict[str, Any]]:
        """Return the JSON lines that a command in the pod prints. Raises KubectlError."""
        text = self.cluster.text("exec", self.pod, "-c", "controller", "--", *command)
        return [json.loads(line) for line in text.splitlines()]
