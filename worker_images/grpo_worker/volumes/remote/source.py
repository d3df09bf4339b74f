"""Choice of the source for the ``uri`` of ``spec.model.volume`` or ``spec.data.volume``."""

from urllib.parse import urlsplit

from grpo_operator.api.v1alpha1.volumes import VolumeSpec
from grpo_worker.volumes.remote.remote_file import Source


def open_source(spec: VolumeSpec, token: str | None, revision: str | None = None) -> Source:
    """Return the source of ``spec.uri``. Raises PermanentFetchError.

    ``revision``: commit of a hub's repository that an earlier, interrupted fetch used.
    """
    assert spec.uri is not None
    scheme = urlsplit(spec.uri).scheme
    # Each source imports libraries that take seconds to load.
    if scheme == "hf":
        from grpo_worker.volumes.remote.hub import HubSource

        return HubSource(spec.uri, spec.endpoint, token, revision)
    if scheme in ("http", "https"):
        from grpo_worker.volumes.remote.web import WebSource

        return WebSource(spec.uri, token)
    from grpo_worker.volumes.remote.objects import object_store

    return object_store(spec.uri)
