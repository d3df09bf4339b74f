"""Stream of an agent to a rank of its engine: a greeting by the rank, then buckets and their fingerprints."""

import struct

STREAM = "grpo-stream-"  # prefix of a stream's name
FINGERPRINT = struct.Struct("<q")  # follows the bytes of each bucket


def greeting(name: str, rank: int) -> bytes:
    """Return what rank ``rank`` sends when it has connected; equally long for all ranks."""
    return f"{name} {rank:8d}\n".encode()
