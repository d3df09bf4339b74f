"""Stands in for pycosat, which is published as C source only and is for another Python where it is packed.

reasoning-gym imports it for the logic puzzles alone.
"""

from typing import NoReturn


def solve(*_: object, **__: object) -> NoReturn:
    """Raise RuntimeError, because pycosat is not packed."""
    raise RuntimeError("this is a stub: pycosat is not in the pack of a machine without a network")


itersolve = solve
