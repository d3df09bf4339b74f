"""A call that is repeated in a thread while a block runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(call: Callable[[], None], seconds: float, name: str) -> Iterator[None]:
    """Make ``call`` every ``seconds`` until the block ends; ``name``: of the thread."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            call()

    thread = threading.Thread(target=repeat, daemon=True, name=name)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
