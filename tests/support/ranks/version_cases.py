"""Functions that run on ranks: what is installed there."""

from importlib import metadata


def version() -> str:
    """Return the version of Megatron-Core."""
    return metadata.version("megatron-core")
