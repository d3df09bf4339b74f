"""A directory of the job's store that holds what a URI names, fetched once for all jobs of the store."""

import errno
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from grpo_operator.api.volumes import VolumeSpec
from grpo_worker.data.fetch_progress import FetchProgress, amount
from grpo_worker.data.remote.errors import InterruptedFetchError, RefusedError
from grpo_worker.data.remote.source import RemoteFile, Source, open_source

COMPLETE = "COMPLETE"  # marker, written last: pods wait for it
FILES = "files"
_AT_ONCE = 8  # files
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class FetchedVolume:
    """``field``: spec.model.volume or spec.data.volume. ``me``: tells this pod's partial files from others'.

    Jobs that fetch the same at once write to files of their own; the first to have a file whole gives it its
    name.
    """

    def __init__(self, field: str, spec: VolumeSpec, directory: Path, token: str | None, me: str) -> None:
        self._field, self._spec, self._token = field, spec, token
        self._directory, self._files = directory, directory / FILES
        self._partial, self._revision = directory / "partial" / me, directory / "REVISION"
        self._me = me

    @property
    def complete(self) -> bool:
        """Is everything there?"""
        return (self._directory / COMPLETE).exists()

    def fetch(self, report: Callable[[str], None], first_pause: float = 1.0) -> None:
        """Fetch what is not there yet. What may pass is tried again without end.

        ``report`` is told how far it is. ``first_pause``: seconds; doubled while nothing comes, up to 60.

        Raises RefusedError that names field, value and remedy.
        """
        pause = first_pause
        while not self.complete:
            progress = FetchProgress(f"fetching {self._field}", report)
            try:
                self._attempt(progress, report)
            except InterruptedFetchError as error:
                if progress.received:
                    pause = first_pause
                report(f"{progress}; interrupted: {error}; next try in {pause:.0f} s")
                time.sleep(pause)
                pause = min(2 * pause, 60.0)

    def _attempt(self, progress: FetchProgress, report: Callable[[str], None]) -> None:
        try:
            with self._local_errors():
                self._partial.mkdir(parents=True, exist_ok=True)
                self._files.mkdir(exist_ok=True)
            source = open_source(self._spec, self._token, self._begun_revision())
            found = self._listing(source)
            self._check_space(found)
            self._download_all(source, found, progress)
        except RefusedError as error:
            raise RefusedError(f"{self._field}.uri={self._spec.uri}: {error}") from error
        with self._local_errors():
            self._remove_others(found)
            if self._spec.digest:
                self._check_digest(found, report)
            self._finish(found)

    def _begun_revision(self) -> str | None:
        return self._revision.read_text() if self._revision.exists() else None

    def _listing(self, source: Source) -> list[RemoteFile]:
        try:
            found = source.files()
        except RefusedError:
            self._revision.unlink(missing_ok=True)  # the repository may have been written anew
            raise
        for file in found:
            if PurePosixPath(file.path).is_absolute() or ".." in PurePosixPath(file.path).parts:
                raise RefusedError(f"it names the file {file.path!r}, which is outside of its directory")
        if source.revision:
            with self._local_errors():
                self._write(self._revision, source.revision)
        return found

    def _check_space(self, found: list[RemoteFile]) -> None:
        missing = [file for file in found if not self._is_there(file)]
        needed = sum((file.size or 0) - self._fetched(file) for file in missing)
        free = shutil.disk_usage(self._directory).free
        if needed > free:
            raise RefusedError(
                f"{amount(needed)} are to be fetched and the job's store has {amount(free)} free: make room "
                "in it, or set another checkpoint.store"
            )

    def _download_all(self, source: Source, found: list[RemoteFile], progress: FetchProgress) -> None:
        """A file that is interrupted does not hold up the others; one that is refused ends them."""
        stop = threading.Event()
        progress.expect({file.path: file.size for file in found})
        interrupted: InterruptedFetchError | None = None
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch") as pool:
            futures = [pool.submit(self._download, source, file, progress, stop) for file in found]
            for future in as_completed(futures):
                try:
                    future.result()
                except InterruptedFetchError as error:
                    interrupted = error
                except BaseException:
                    stop.set()
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        if interrupted:
            raise interrupted

    def _download(
        self, source: Source, file: RemoteFile, progress: FetchProgress, stop: threading.Event
    ) -> None:
        if self._is_there(file):
            progress.begin(file.path, self._target(file).stat().st_size)
            return
        partial, offset = self._partial_of(file), self._fetched(file)
        progress.begin(file.path, offset)
        with self._local_errors(), partial.open("ab" if offset else "wb") as handle:
            if offset != file.size or offset == 0:
                for chunk in _named(file, source.read(file, offset)):
                    handle.write(chunk)
                    progress.receive(file.path, len(chunk))
                    if stop.is_set():
                        return
            handle.flush()
            os.fsync(handle.fileno())
        with self._local_errors():
            _check(partial, file)
            target = self._target(file)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.replace(target)

    def _is_there(self, file: RemoteFile) -> bool:
        target = self._target(file)
        return target.is_file() and file.size in (None, target.stat().st_size)

    def _target(self, file: RemoteFile) -> Path:
        return self._files / file.path

    def _partial_of(self, file: RemoteFile) -> Path:
        name = hashlib.sha256(f"{file.path}\n{file.version}".encode()).hexdigest()
        return self._partial / name[:16]

    def _fetched(self, file: RemoteFile) -> int:
        """Bytes of a file that an earlier try has fetched, if they are known to be of the same version."""
        partial = self._partial_of(file)
        if not file.version or file.size is None or not partial.exists():
            return 0
        size = partial.stat().st_size
        return size if size <= file.size else 0

    def _remove_others(self, found: list[RemoteFile]) -> None:
        """Remove what an earlier try has fetched and the source no longer has."""
        wanted = {self._target(file) for file in found}
        for path in [path for path in self._files.rglob("*") if path.is_file() and path not in wanted]:
            path.unlink(missing_ok=True)

    def _check_digest(self, found: list[RemoteFile], report: Callable[[str], None]) -> None:
        checking = FetchProgress(f"checking {self._field}", report)
        checking.expect({file.path: self._target(file).stat().st_size for file in found})
        total = hashlib.sha256()
        for file in sorted(found, key=lambda file: file.path):
            own = hashlib.sha256()
            with self._target(file).open("rb") as handle:
                while chunk := handle.read(1 << 20):
                    own.update(chunk)
                    checking.receive(file.path, len(chunk))
            total.update(f"{own.hexdigest()}  {file.path}\n".encode())
        digest = f"sha256:{total.hexdigest()}"
        if digest != self._spec.digest:
            shutil.rmtree(self._files, ignore_errors=True)  # so that a new try fetches anew
            raise RefusedError(
                f"{self._field}.digest={self._spec.digest}: the files of {self._spec.uri} have {digest}: "
                "correct digest, or name the revision that has it in uri"
            )

    def _finish(self, found: list[RemoteFile]) -> None:
        size = sum(self._target(file).stat().st_size for file in found)
        summary = {"uri": self._spec.uri, "files": len(found), "bytes": size}
        self._write(self._directory / COMPLETE, json.dumps(summary))
        shutil.rmtree(self._partial.parent, ignore_errors=True)

    def _write(self, path: Path, text: str) -> None:
        temporary = self._directory / f"{path.name}.{self._me}"
        temporary.write_text(text)
        temporary.replace(path)

    @contextmanager
    def _local_errors(self) -> Iterator[None]:
        """Tell what the store's filesystem refuses for good from what may pass, such as a lost NFS server."""
        try:
            yield
        except (RefusedError, InterruptedFetchError):
            raise
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise RefusedError(
                    "the job's store is full: make room in it, or set another checkpoint.store"
                ) from error
            if error.errno in _FORBIDDEN:
                raise RefusedError(f"the job's store cannot be written to: {error}") from error
            raise InterruptedFetchError(f"job's store: {error}") from error


def _named(file: RemoteFile, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The chunks; errors of the source name the file."""
    try:
        yield from chunks
    except (RefusedError, InterruptedFetchError) as error:
        raise type(error)(f"{file.path}: {error}") from error


def _check(partial: Path, file: RemoteFile) -> None:
    """Is a fetched file what the source promised? One that is not is removed."""
    size = partial.stat().st_size
    if file.size is not None and size != file.size:
        partial.unlink()
        raise InterruptedFetchError(f"{file.path}: {size} bytes came of {file.size}")
    if file.sha256 is None:
        return
    with partial.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != file.sha256:
        partial.unlink()
        raise InterruptedFetchError(
            f"{file.path}: its content has sha256 {found}, not {file.sha256} as the hub says"
        )
