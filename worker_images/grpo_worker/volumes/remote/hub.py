"""Source for repositories of the Hugging Face Hub or of a mirror."""

import re
from collections.abc import Iterator
from functools import cached_property

from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.hf_api import RepoFile

from grpo_worker.volumes.remote.errors import PermanentFetchError, translated
from grpo_worker.volumes.remote.remote_file import RemoteFile
from grpo_worker.volumes.remote.web import stream

_URI = re.compile(r"hf://(?P<datasets>datasets/)?(?P<name>[^/@]+/[^/@]+)(@(?P<revision>.+))?")


class HubSource:
    """A repository at one commit. ``commit``: None for the newest commit of the URI's revision."""

    def __init__(self, uri: str, endpoint: str | None, token: str | None, commit: str | None = None) -> None:
        match = _URI.fullmatch(uri)
        if match is None:
            raise PermanentFetchError("write hf://ORG/NAME[@REVISION] or hf://datasets/ORG/NAME[@REVISION]")
        self._endpoint, self._token = endpoint, token
        self._name, self._requested = match["name"], match["revision"]
        self._type = "dataset" if match["datasets"] else "model"
        self._commit = commit
        self._api = HfApi(endpoint=endpoint, token=token or False)

    @cached_property
    def revision(self) -> str:
        """The commit to fetch; it is fixed, so that a moving branch does not mix two versions."""
        if self._commit:
            return self._commit
        with translated(self._token):
            info = self._api.repo_info(self._name, repo_type=self._type, revision=self._requested)
        assert info.sha is not None
        return info.sha

    def files(self) -> list[RemoteFile]:
        """Return all files of the repository."""
        with translated(self._token):
            tree = self._api.list_repo_tree(
                self._name, recursive=True, revision=self.revision, repo_type=self._type
            )
            return [self._file(entry) for entry in tree if isinstance(entry, RepoFile)]

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        """Return the bytes of a file from ``offset`` on."""
        yield from stream(file.address, self._token, offset)

    def _file(self, entry: RepoFile) -> RemoteFile:
        address = hf_hub_url(
            self._name, entry.path, repo_type=self._type, revision=self.revision, endpoint=self._endpoint
        )
        sha256 = entry.lfs.sha256 if entry.lfs else None
        return RemoteFile(entry.path, address, entry.size, entry.blob_id, sha256)
