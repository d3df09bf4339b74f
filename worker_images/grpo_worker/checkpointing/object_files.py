"""Files of a rank's state in an object store: written as a stream of parts, read piece by piece."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from grpo_worker.checkpointing.piece_digests import OF_OBJECTS, PieceDigests, PieceNotes, write_pieces
from grpo_worker.checkpointing.store import DamagedCheckpointError, state_folder
from grpo_worker.common.object_stream import ObjectStream
from grpo_worker.common.store_path import patiently

if TYPE_CHECKING:
    from upath import UPath

_AHEAD_BYTES = 256 << 20  # of pieces that are read before their turn
_THREADS = 4
_Span = tuple[int, int]  # first byte and length of a piece


class _Upload(ObjectStream):
    """Stream that notes the digest of each piece."""

    def __init__(self, file: "UPath") -> None:
        super().__init__(file)
        self.notes = PieceNotes(OF_OBJECTS)

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.notes.add(data)
        return written


def upload(file: "UPath", pieces: Sequence[Callable[[Any], Any]]) -> list[Any]:
    """Write a file of the pieces that functions write to a stream; return their results.

    The whole file is written again while the store does not answer: the state is in host memory till then.
    """
    return patiently(lambda: _upload(file, pieces), f"writing {file}")


def _upload(file: "UPath", pieces: Sequence[Callable[[Any], Any]]) -> list[Any]:
    stream = _Upload(file)
    try:
        results = write_pieces(stream, pieces)
        stream.complete()
    except BaseException:
        stream.discard()
        raise
    digests = file.with_name(file.name + OF_OBJECTS)
    digests.fs.pipe_file(digests.path, stream.notes.text().encode())
    return results


class ObjectFiles:
    """Files of one checkpoint, with the interface that torch's FileSystemReader has for files.

    Pieces are read ahead in threads, because a request takes long and a rank reads thousands of them.
    """

    def __init__(self, folder: "UPath") -> None:
        self._folder = state_folder(folder)
        self._digests = PieceDigests.of(folder)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pieces")
        self._wanted: deque[tuple[str, _Span]] = deque()
        self._coming: deque[tuple[str, _Span, Future[bytes]]] = deque()

    def expect(self, pieces: Iterable[tuple[str, int, int]]) -> None:
        """Read these pieces ahead: name of the file, first byte and length, in the order of their use."""
        self._wanted = deque((name, (start, length)) for name, start, length in pieces)
        self._coming.clear()

    def concat_path(self, _path: Any, name: str) -> str:
        return name

    @contextmanager
    def create_stream(self, name: str, mode: str) -> Iterator["_Pieces"]:
        assert mode == "rb"
        yield _Pieces(self, name)

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return a piece. Raises DamagedCheckpointError if it is not what was written."""
        span = (start, length)
        self._look_ahead()
        if self._coming and self._coming[0][:2] == (name, span):
            found = self._coming.popleft()[2].result()
        else:
            found = self._fetch(name, span)
        if not self._digests.check(name, start, length, found):
            raise DamagedCheckpointError(
                f"checkpoint {self._folder}: {name} has no digests beside it; use an older checkpoint"
            )
        return found

    def _look_ahead(self) -> None:
        size = sum(span[1] for _, span, _ in self._coming)
        while self._wanted and (not self._coming or size + self._wanted[0][1][1] <= _AHEAD_BYTES):
            name, span = self._wanted.popleft()
            self._coming.append((name, span, self._threads.submit(self._fetch, name, span)))
            size += span[1]

    def _fetch(self, name: str, span: _Span) -> bytes:
        file, (start, length) = self._folder / name, span
        read = lambda: bytes(file.fs.cat_file(file.path, start=start, end=start + length))  # noqa: E731
        try:
            return patiently(read, f"reading {file}")
        except FileNotFoundError as error:
            raise DamagedCheckpointError(
                f"checkpoint {self._folder}: {name} is missing; use an older checkpoint"
            ) from error


class _Pieces:
    """An open file of ObjectFiles."""

    def __init__(self, files: ObjectFiles, name: str) -> None:
        self._files, self._name = files, name

    def piece(self, start: int, length: int) -> bytes:
        return self._files.read(self._name, start, length)
