"""An image that the node has lost and that no registry has."""

import contextlib
from collections.abc import Iterator

from grpo_devcluster.node import ctr


@contextlib.contextmanager
def unavailable(reference: str) -> Iterator[None]:
    """Hide an image from kubelet; containers that run keep it. Meanwhile pulls fail."""
    kept = f"{reference}-kept"  # a name that keeps its content from being collected
    _ctr("images", "tag", reference, kept)
    try:
        _ctr("images", "remove", "--sync", reference)
        yield
    finally:
        _ctr("images", "tag", kept, reference)
        _ctr("images", "remove", kept)


def _ctr(*arguments: str) -> None:
    code, output = ctr(*arguments)
    assert code == 0, output
