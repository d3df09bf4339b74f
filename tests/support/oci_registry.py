"""A real OCI registry on this machine, which keeps what is pushed in memory."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from grpo_devcluster.gobuild import binary, build_all
from support.engine_server import free_port


@contextmanager
def oci_registry() -> Iterator[str]:
    """Run a registry and yield its host and port; it speaks plain HTTP."""
    build_all(("registry",))
    host = f"127.0.0.1:{free_port()}"
    command = [str(binary("registry")), "-port", host.rpartition(":")[2]]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(process, host)
        yield host
    finally:
        process.kill()
        process.wait()


def digest_in(host: str, repository: str, reference: str) -> str:
    """Return the digest that the registry names for a manifest, "" if it has none."""
    kinds = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
    answer = httpx.head(f"http://{host}/v2/{repository}/manifests/{reference}", headers={"Accept": kinds})
    return answer.headers.get("docker-content-digest", "") if answer.is_success else ""


def _wait(process: subprocess.Popen[bytes], host: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            httpx.get(f"http://{host}/v2/", timeout=1)
        except httpx.HTTPError:
            assert process.poll() is None, "the registry has ended"
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the registry does not answer")
