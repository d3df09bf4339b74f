"""Arguments of SGLang's server that depend on the pod: its addresses, and its certificate if it has one."""

import threading
from pathlib import Path

from grpo_operator.api.names import CERTIFICATE, GENERATE, PRIVATE_KEY
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
    if folder is None:
        return arguments
    copies.mkdir(mode=0o700, exist_ok=True)
    copy(folder, copies)
    threading.Thread(target=_copy_forever, args=(folder, copies), daemon=True).start()
    return [
        *arguments,
        *("--ssl-certfile", str(copies / CERTIFICATE)),
        *("--ssl-keyfile", str(copies / PRIVATE_KEY)),
        "--enable-ssl-refresh",
        *("--api-key", (folder / GENERATE).read_text().strip()),
    ]


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
