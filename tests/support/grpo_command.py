"""The command ``kubectl grpo`` against the devcluster, as users call it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from grpo_devcluster.gobuild import binary
from grpo_devcluster.paths import KUBECONFIG


def grpo(*arguments: str) -> str:
    """Run the command and return what it prints."""
    return subprocess.run(_command(*arguments), capture_output=True, text=True, check=True).stdout


@contextmanager
def page_of(job: str) -> Iterator[str]:
    """Serve the page of a job as users do, and yield its URL."""
    with subprocess.Popen(_command("ui", job, "--no-browser"), stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        try:
            url = serving.stdout.readline().strip()
            assert url, f"{job} has no page now"
            yield url
        finally:
            serving.terminate()  # a shell lets what runs in its background ignore SIGINT


def _command(*arguments: str) -> list[str]:
    options = [f"--kubectl={binary('kubectl')}", f"--kubeconfig={KUBECONFIG}"]
    return [sys.executable, "-m", "grpo_operator.cli.kubectl.main", *options, *arguments]
