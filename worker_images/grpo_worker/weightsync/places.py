"""Where bytes begin that lie beside others (pure)."""

ALIGNED = 256  # bytes; what devices read and write at once, and where every dtype may begin

MARGIN = 64  # this part of a bucket is spared for what is needed beside it


def aligned(nbytes: int) -> int:
    """So many bytes, or the next number that leaves what follows aligned."""
    return -(-nbytes // ALIGNED) * ALIGNED
