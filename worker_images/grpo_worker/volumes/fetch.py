"""Fetch the volumes of a job that have a ``uri`` into its store, before the controller starts.

Usage: ``python3 -m grpo_worker.volumes.fetch model=DIRECTORY data=DIRECTORY``. Meanwhile it serves
progress at the controller's port, so that the operator can report it.
"""

import logging
import os
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path

from grpo_operator.api.v1alpha1.status import Phase
from grpo_operator.api.v1alpha1.volumes import CredentialSpec, VolumeSpec
from grpo_worker.controller.config import JobConfig, load_job_config
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.status.server import application, serve_in_background
from grpo_worker.volumes.fetched_volume import FetchedVolume
from grpo_worker.volumes.remote.errors import PermanentFetchError

log = logging.getLogger(__name__)
# Long enough for the operator to read why; kubelet then starts the container again, with the Secret of then.
_SECRET_SECONDS = 30.0


class MissingSecretError(LookupError):
    """The Secret of a credential does not exist yet."""


def main() -> None:
    """Fetch, and end; or say what is wrong until stopped."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    board = ProgressBoard()
    config = load_job_config()
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
    """Fetch the volume of ``kind``, model or data, and report on the board.

    Raises PermanentFetchError or MissingSecretError.
    """
    volume = config.spec.model.volume if kind == "model" else config.spec.data.volume
    assert volume is not None
    field = f"spec.{kind}.volume"
    found = os.environ.get(f"GRPO_{kind.upper()}_CREDENTIAL")
    pod = os.environ.get("POD_NAME") or os.uname().nodename

    def report(message: str) -> None:
        if message != board.get().message:
            log.info("%s", message)
        board.update(message=message[:1000])

    credential = partial(_token, field, volume, found)
    FetchedVolume(field, volume, directory, credential, config.writer, pod).fetch(report)
    report(f"{field} is fetched: controller, training pods and engines start")


def _token(field: str, volume: VolumeSpec, found: str | None) -> str | None:
    wanted: CredentialSpec | None = volume.credential
    if wanted is None:
        return None
    if not found or not found.strip():
        raise MissingSecretError(
            f"{field}.credential: Secret {wanted.secret} has no key {wanted.key}: "
            f"kubectl create secret generic {wanted.secret} --from-literal={wanted.key}=TOKEN"
        )
    token = found.strip()
    if not re.fullmatch(r"[!-~]+", token):  # the error of an HTTP client would show it
        raise PermanentFetchError(
            f"{field}.credential: key {wanted.key} of Secret {wanted.secret} holds characters that no token "
            "has: write the token alone"
        )
    return token


if __name__ == "__main__":
    main()
