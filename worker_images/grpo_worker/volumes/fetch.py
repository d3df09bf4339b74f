"""Entry point of the init container that fetches a job's volumes with a ``uri`` into its store.

Usage: ``python3 -m grpo_worker.volumes.fetch model=DIRECTORY data=DIRECTORY``. It serves its progress at the
controller's port, so that the operator can report it.
"""

import logging
import os
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path

from grpo_operator.api.job_config import JobConfig
from grpo_operator.api.v1alpha1.status import Phase
from grpo_operator.api.v1alpha1.volumes import CredentialSpec, VolumeSpec
from grpo_worker.common.log_lines import log_as
from grpo_worker.controller.config import load_job_config
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.status.server import application, serve_in_background
from grpo_worker.volumes.fetched_volume import FetchedVolume
from grpo_worker.volumes.remote.errors import PermanentFetchError

log = logging.getLogger(__name__)
# The operator can read the reason for this long; then kubelet restarts the container with the current Secret.
_SECRET_SECONDS = 30.0


class MissingSecretError(LookupError):
    """The Secret of a credential does not exist yet."""


def main() -> None:
    """Fetch the volumes and exit; after a permanent error, serve its message until the pod is deleted."""
    log_as("fetch")
    config = load_job_config()
    board = ProgressBoard(config.writer)
    serve_in_background(application(board, list))
    try:
        for argument in sys.argv[1:]:
            kind, _, directory = argument.partition("=")
            fetch(kind, config, Path(directory), board)
    except PermanentFetchError as error:
        log.error("%s", error)
        board.update(phase=Phase.FAILED, message=str(error)[:1000])
        signal.pause()
    except MissingSecretError as error:
        log.error("%s", error)
        board.update(message=str(error))
        time.sleep(_SECRET_SECONDS)
        sys.exit(1)


def fetch(kind: str, config: JobConfig, directory: Path, board: ProgressBoard) -> None:
    """Fetch the volume of ``kind`` (model or data) and report progress on the board.

    Raises PermanentFetchError or MissingSecretError.
    """
    volume = config.spec.model.volume if kind == "model" else config.spec.data.volume
    assert volume is not None
    field = f"spec.{kind}.volume"
    secret_value = os.environ.get(f"GRPO_{kind.upper()}_CREDENTIAL")
    pod = os.environ.get("POD_NAME") or os.uname().nodename

    def report(message: str) -> None:
        if message != board.get().message:
            log.info("%s", message)
        board.update(message=message[:1000])

    credential = partial(_token, field, volume, secret_value)
    FetchedVolume(field, volume, directory, credential, config.writer, pod).fetch(report)
    report(f"{field} is fetched: controller, training pods and engines start")


def _token(field: str, volume: VolumeSpec, secret_value: str | None) -> str | None:
    credential: CredentialSpec | None = volume.credential
    if credential is None:
        return None
    if not secret_value or not secret_value.strip():
        raise MissingSecretError(
            f"{field}.credential: Secret {credential.secret} has no key {credential.key}: "
            f"kubectl create secret generic {credential.secret} --from-literal={credential.key}=TOKEN"
        )
    token = secret_value.strip()
    if not re.fullmatch(r"[!-~]+", token):  # the error of an HTTP client would contain the token
        raise PermanentFetchError(
            f"{field}.credential: key {credential.key} of Secret {credential.secret} contains characters "
            "that no token has: store only the token"
        )
    return token


if __name__ == "__main__":
    main()
