"""Where the process of a rank runs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankHost:
    """Process of one rank. ``address``: IP address of its pod; ``pod``: the pod's name."""

    address: str
    pid: int
    pod: str = ""

    def __str__(self) -> str:
        return f"{self.pod or 'pod'} ({self.address})"
