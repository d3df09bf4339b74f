"""Stream of an agent to a rank of its engine: a greeting by the rank, then buckets and their fingerprints.

Before the buckets a rank that gets only its parts sends the table of the regions that it keeps. While it
finds them out, it sends beats.
"""

import struct

STREAM = "grpo-stream-"  # prefix of a stream's name
FINGERPRINT = struct.Struct("<q")  # follows the bytes of each bucket
COUNT = struct.Struct("<i")  # of the table's regions, which follow it as little-endian int32
BEAT = -1  # in place of a count: the rank makes progress


def greeting(name: str, rank: int) -> bytes:
    """Return what rank ``rank`` sends when it has connected; equally long for all ranks."""
    return f"{name} {rank:8d}\n".encode()
