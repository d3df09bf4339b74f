"""Jobs on the devcluster."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from grpo_devcluster.follow import JobView

ENDED = frozenset({"Succeeded", "Failed"})
STEPS = 110  # of a run that must learn
CALM = 100  # steps of the run ``calm``, which are enough for two losses of Ray's head and one of a rank

Start = Callable[..., JobView]


def apply(kubeconfig: Path, text: str, *arguments: str) -> str:
    """Run kubectl with a manifest on standard input and return its output."""
    from grpo_devcluster.gobuild import binary

    command = [str(binary("kubectl")), f"--kubeconfig={kubeconfig}", *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def events(job: JobView) -> str:
    """Return the events of a job as kubectl prints them."""
    return job.kubectl("get", "events", f"--field-selector=involvedObject.name={job.name}")
