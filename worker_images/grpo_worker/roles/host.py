"""Where the process of a rank runs."""

from dataclasses import dataclass

from grpo_worker.common.versions import Versions


@dataclass(frozen=True, slots=True)
class RankHost:
    """Process of one rank. ``address``: IP address of its pod; ``pod``: the pod's name.

    ``versions``: of its image. ``node``: name of the Kubernetes node, "" where it is not known.
    """

    address: str
    pid: int
    pod: str = ""
    versions: Versions = Versions()
    node: str = ""

    def __str__(self) -> str:
        return f"{self.pod or 'pod'} ({self.address})"
