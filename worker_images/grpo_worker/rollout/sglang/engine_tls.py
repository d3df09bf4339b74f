"""Arguments of SGLang's server that depend on the pod: its addresses, its certificate and its key, if any."""

import os
import threading
from pathlib import Path

from grpo_operator.api.names import API_KEY_VARIABLE, CERTIFICATE, GENERATE, PRIVATE_KEY
from grpo_worker.common import tls
from grpo_worker.common.own_address import only_ipv6

# SGLang watches files, not links, and would see the first of kubelet's replacements only. It therefore gets
# copies, in memory because one is a key.
COPIES = Path("/dev/shm/grpo-tls")
_LOOK_SECONDS = 10.0


def own_arguments(copies: Path = COPIES) -> list[str]:
    """Return the arguments; with a certificate, a thread goes on to copy what kubelet replaces."""
    arguments = ["--host", "::"] if only_ipv6() else []
    folder = tls.folder()
    if folder is not None:
        arguments += _certificate(folder, copies)
    key = _key_file(folder)
    return arguments if key is None else [*arguments, "--api-key", key.read_text().strip()]


def _certificate(folder: Path, copies: Path) -> list[str]:
    copies.mkdir(mode=0o700, exist_ok=True)
    copy(folder, copies)
    threading.Thread(target=_copy_forever, args=(folder, copies), daemon=True).start()
    return [
        *("--ssl-certfile", str(copies / CERTIFICATE)),
        *("--ssl-keyfile", str(copies / PRIVATE_KEY)),
        "--enable-ssl-refresh",
    ]


def _key_file(folder: Path | None) -> Path | None:
    """Return the file with the key of requests: that of users, or with TLS that of the job."""
    served = os.environ.get(API_KEY_VARIABLE)
    if served:
        return Path(served)
    return folder / GENERATE if folder else None


def copy(folder: Path, copies: Path) -> None:
    """Write what has changed into the same files, the certificate last: SGLang reads both after a change."""
    for name in (PRIVATE_KEY, CERTIFICATE):
        content, file = (folder / name).read_bytes(), copies / name
        if not file.exists() or file.read_bytes() != content:
            file.touch(mode=0o600)
            file.write_bytes(content)


def _copy_forever(folder: Path, copies: Path) -> None:
    pause = threading.Event()
    while not pause.wait(_LOOK_SECONDS):
        try:
            copy(folder, copies)
        except OSError:  # kubelet replaces them right now
            continue
