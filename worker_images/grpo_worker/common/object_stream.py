"""Stream into an object of an object store."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upath import UPath

PART = 32 << 20  # bytes of a request; S3 takes up to 10,000 parts of a file


class ObjectStream:
    """Stream into an object, which appears when all of it is there.

    ``problem``: the error of a write that failed.
    """

    def __init__(self, file: "UPath") -> None:
        self._stream = file.fs.open(file.path, "wb", block_size=PART)
        self.problem: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), PART):
                self._stream.write(view[start : start + PART])
        except OSError as error:
            self.problem = error
            raise
        return len(view)

    def tell(self) -> int:
        return int(self._stream.tell())

    def flush(self) -> None: ...

    def complete(self) -> None:
        self._stream.close()

    def discard(self) -> None:
        """Give the upload up. Parts that cannot be removed now are removed with the folder."""
        self._stream.closed = True  # else its destructor would complete it
        with suppress(OSError):
            self._stream.discard()


@contextmanager
def object_stream(file: "UPath") -> Iterator[ObjectStream]:
    """Open a stream into an object, which appears at the end of the context, unless that raises."""
    stream = ObjectStream(file)
    try:
        yield stream
        stream.complete()
    except BaseException:
        stream.discard()
        raise
