"""A directory of the job's store that holds what a URI names, fetched once for all jobs of the store."""

import hashlib
import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from grpo_operator.api.v1alpha1.volumes import COMPLETE, FETCHED_FILES, VolumeSpec
from grpo_worker.volumes.lease import FetchLease
from grpo_worker.volumes.progress import FetchProgress, amount
from grpo_worker.volumes.remote.errors import PermanentFetchError, TransientFetchError
from grpo_worker.volumes.remote.remote_file import RemoteFile, Source
from grpo_worker.volumes.remote.source import open_source
from grpo_worker.volumes.store_errors import StoreUnavailableError, store_errors

_AT_ONCE = 8  # files
_POLL_SECONDS = 2.0  # between two looks at what another job fetches
_FRUITLESS = 3  # attempts without a byte, after which the message says what to check
Credential = Callable[[], str | None]


class FetchedVolume:
    """``field``: spec.model.volume or spec.data.volume. ``credential``: asked for when this pod fetches.

    ``writer``: the job, which keeps its partial files when its pod is replaced. Of the jobs that want the
    same, the holder of the lease fetches.
    """

    def __init__(
        self, field: str, spec: VolumeSpec, directory: Path, credential: Credential, writer: str, pod: str
    ) -> None:
        self._field, self._spec, self._credential = field, spec, credential
        self._directory, self._files = directory, directory / FETCHED_FILES
        self._partial, self._revision = directory / "partial" / writer, directory / "REVISION"
        self._lease = FetchLease(directory, writer, pod)
        self._writer = writer

    def fetch(self, report: Callable[[str], None], first_pause: float = 1.0) -> None:
        """Fetch what is not there yet, or wait for the job that does. Transient errors are retried forever.

        ``report`` is told how far it is. ``first_pause``: seconds; doubled while nothing comes, up to 60.

        Raises PermanentFetchError that names field, value and remedy.
        """

        def tell(message: str) -> None:
            self._lease.progress = message
            report(message)

        pause, fruitless = first_pause, 0
        try:
            while True:
                progress = FetchProgress(f"fetching {self._field}", tell)
                try:
                    if self._advance(progress, tell):
                        return
                    time.sleep(_POLL_SECONDS)
                except TransientFetchError as error:
                    pause, fruitless = (first_pause, 0) if progress.received else (pause, fruitless + 1)
                    if fruitless:
                        self._lease.release()  # another job may get through
                    hint = self._hint(error) if fruitless >= _FRUITLESS else ""
                    tell(f"{progress}; interrupted: {error}{hint}; next try in {pause:.0f} s")
                    time.sleep(pause)
                    pause = min(2 * pause, 60.0)
        finally:
            self._lease.release()

    def _hint(self, error: TransientFetchError) -> str:
        if isinstance(error, StoreUnavailableError):
            return ""
        given = "endpoint" if self._spec.endpoint else "uri"
        return f"; check {self._field}.{given} and the proxy, DNS and certificates of the controller's pod"

    def _advance(self, progress: FetchProgress, report: Callable[[str], None]) -> bool:
        """Fetch, unless another job does. Is everything there?"""
        with self._explained():
            if self._is_complete():
                return True
            self._directory.mkdir(parents=True, exist_ok=True)
            acquired, holder = self._lease.acquire(), self._lease.holder()
            if acquired and self._is_complete():
                return True  # the last holder ended between the look and the lease
        if acquired:
            self._attempt(progress, report)
        elif holder:
            who = "another pod of this job" if holder.writer == self._writer else "another job"
            report(f"{self._field}: {who} fetches it: {holder.writer}: {holder.progress}".rstrip(": "))
        return acquired

    def _is_complete(self) -> bool:
        return (self._directory / COMPLETE).exists()

    def _attempt(self, progress: FetchProgress, report: Callable[[str], None]) -> None:
        token = self._credential()
        with self._explained():
            self._partial.mkdir(parents=True, exist_ok=True)
            self._files.mkdir(exist_ok=True)
            source = open_source(self._spec, token, self._begun_revision())
            found = self._listing(source)
            self._remove_others(found)
            self._check_space(found)
            self._download_all(source, found, progress)
        if self._spec.digest:
            self._check_digest(found, report)
        with self._explained():
            self._finish(found)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors are those of a fetch, and name the field."""
        try:
            with store_errors():
                yield
        except PermanentFetchError as error:
            raise PermanentFetchError(f"{self._field}.uri={self._spec.uri}: {error}") from error

    def _begun_revision(self) -> str | None:
        try:
            return self._revision.read_text()
        except FileNotFoundError:
            return None

    def _listing(self, source: Source) -> list[RemoteFile]:
        try:
            found = source.files()
        except PermanentFetchError:
            self._revision.unlink(missing_ok=True)  # the repository may have been written anew
            raise
        _check_names(found)
        if source.revision:
            self._write(self._revision, source.revision)
        return found

    def _check_space(self, found: list[RemoteFile]) -> None:
        missing = [file for file in found if not self._is_there(file)]
        needed = sum((file.size or 0) - self._fetched(file) for file in missing)
        free = self._free()
        if needed > free:
            self._remove_partial_of_others()
            free = self._free()
        if needed > free:
            raise PermanentFetchError(
                f"{amount(needed)} are to be fetched and the job's store has {amount(free)} free: make room "
                "in it, or set another checkpoint.store"
            )

    def _free(self) -> int:
        return shutil.disk_usage(self._directory).free

    def _remove_partial_of_others(self) -> None:
        """Remove what jobs have left that no longer fetch."""
        for path in self._partial.parent.iterdir():
            if path != self._partial:
                shutil.rmtree(path, ignore_errors=True)

    def _download_all(self, source: Source, found: list[RemoteFile], progress: FetchProgress) -> None:
        """A file that is interrupted does not hold up the others; one that is refused ends them."""
        stop = threading.Event()
        progress.expect({file.path: file.size for file in found})
        interrupted: TransientFetchError | None = None
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch") as pool:
            futures = [pool.submit(self._download, source, file, progress, stop) for file in found]
            for future in as_completed(futures):
                try:
                    future.result()
                except TransientFetchError as error:
                    interrupted = error
                except BaseException:
                    stop.set()
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        if interrupted:
            raise interrupted
        if self._lease.lost.is_set():
            raise TransientFetchError("another job has taken over")

    def _download(
        self, source: Source, file: RemoteFile, progress: FetchProgress, stop: threading.Event
    ) -> None:
        with store_errors():
            if self._is_there(file):
                progress.begin(file.path, self._target(file).stat().st_size)
                return
            partial, offset = self._partial_of(file), self._fetched(file)
            progress.begin(file.path, offset)
            with partial.open("ab" if offset else "wb") as handle:
                if offset != file.size or offset == 0:
                    for chunk in _named(file, source.read(file, offset)):
                        handle.write(chunk)
                        progress.receive(file.path, len(chunk))
                        if stop.is_set() or self._lease.lost.is_set():
                            return
                handle.flush()
                os.fsync(handle.fileno())
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
        with self._explained():
            digest = self._digest(found, report)
        if digest != self._spec.digest:
            shutil.rmtree(self._files, ignore_errors=True)  # so that a new try fetches anew
            raise PermanentFetchError(
                f"{self._field}.digest={self._spec.digest}: the files of {self._spec.uri} have {digest}: "
                "correct digest, or name the revision that has it in uri"
            )

    def _digest(self, found: list[RemoteFile], report: Callable[[str], None]) -> str:
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
        return f"sha256:{total.hexdigest()}"

    def _finish(self, found: list[RemoteFile]) -> None:
        size = sum(self._target(file).stat().st_size for file in found)
        summary = {"uri": self._spec.uri, "files": len(found), "bytes": size}
        self._write(self._directory / COMPLETE, json.dumps(summary))
        shutil.rmtree(self._partial.parent, ignore_errors=True)

    def _write(self, path: Path, text: str) -> None:
        temporary = self._directory / f"{path.name}.{self._writer}"
        temporary.write_text(text)
        temporary.replace(path)


def _check_names(found: list[RemoteFile]) -> None:
    paths = [PurePosixPath(file.path) for file in found]
    for path, number in Counter(paths).items():
        if path.is_absolute() or ".." in path.parts:
            raise PermanentFetchError(f"it names the file {str(path)!r}, which is outside of its directory")
        if not path.parts or number > 1:
            raise PermanentFetchError(
                f"it names {number} files {str(path)!r}: correct uri, or give files names that differ"
            )


def _named(file: RemoteFile, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The chunks; errors of the source name the file."""
    try:
        yield from chunks
    except (PermanentFetchError, TransientFetchError) as error:
        raise type(error)(f"{file.path}: {error}") from error


def _check(partial: Path, file: RemoteFile) -> None:
    """Is a fetched file what the source promised? One that is not is removed."""
    size = partial.stat().st_size
    if file.size is not None and size != file.size:
        partial.unlink()
        raise TransientFetchError(f"{file.path}: {size} bytes came of {file.size}")
    if file.sha256 is None:
        return
    with partial.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != file.sha256:
        partial.unlink()
        raise TransientFetchError(
            f"{file.path}: its content has sha256 {found}, not {file.sha256} as the hub says"
        )
