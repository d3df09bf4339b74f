"""Stream of an agent to a rank of its engine: a greeting by the rank, then buckets and their fingerprints.

Before the buckets a rank that gets only its parts sends the table of the regions that it keeps. While it
finds them out, it sends beats.
"""

import struct
from collections.abc import Sequence

LOOPBACK = "127.0.0.1"
STREAM = "grpo-stream-"  # prefix of a stream's name
FINGERPRINT = struct.Struct("<q")  # follows the bytes of each bucket
COUNT = struct.Struct("<i")  # of the table's regions, which follow it as little-endian int32
BEAT = -1  # in place of a count: the rank makes progress


def places_of_hosts(ports: Sequence[int]) -> str:
    """Return the address for the ranks of several hosts: each rank connects to the agent of its own pod.

    ``ports``: at which the agents listen, by host.
    """
    return ",".join(f"{LOOPBACK}:{port}" for port in ports)


def place_of_rank(address: str, port: int, rank: int, ranks: int) -> tuple[str, int]:
    """Return address and port for rank ``rank`` of ``ranks``, of which each host has equally many."""
    hosts = address.split(",")
    if len(hosts) == 1:
        return address, port
    own, _, number = hosts[rank * len(hosts) // ranks].rpartition(":")
    return own, int(number)


def greeting(name: str, rank: int) -> bytes:
    """Return what rank ``rank`` sends when it has connected; equally long for all ranks."""
    return f"{name} {rank:8d}\n".encode()
