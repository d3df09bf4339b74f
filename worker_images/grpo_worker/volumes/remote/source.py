"""What a ``uri`` of ``spec.model.volume`` or ``spec.data.volume`` names."""

from urllib.parse import urlsplit

from grpo_operator.api.v1alpha1.volumes import VolumeSpec
from grpo_worker.volumes.remote.remote_file import Source


def open_source(spec: VolumeSpec, token: str | None, revision: str | None = None) -> Source:
    """The source of ``spec.uri``. ``revision``: the commit of a hub's repository that an earlier fetch began.

    Raises PermanentFetchError.
    """
    assert spec.uri is not None
    scheme = urlsplit(spec.uri).scheme
    # Each of them imports libraries that take seconds.
    if scheme == "hf":
        from grpo_worker.volumes.remote.hub import HubSource

        return HubSource(spec.uri, spec.endpoint, token, revision)
    if scheme in ("http", "https"):
        from grpo_worker.volumes.remote.web import WebSource

        return WebSource(spec.uri, token)
    from grpo_worker.volumes.remote.objects import object_store

    return object_store(spec.uri)
