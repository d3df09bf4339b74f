"""The names that SGLang imports; a server has no notebook to display anything in."""

from typing import Any


def display(*_: Any, **__: Any) -> None:
    """Raise RuntimeError, because IPython is not packed."""
    raise RuntimeError("this is a stub: IPython is not in the pack of a machine without a network")


class HTML:
    """Raises RuntimeError when it is made, like ``display``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        display()
