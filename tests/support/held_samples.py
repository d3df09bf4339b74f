"""Samples that an engine holds: its scheduler is stopped between their requests and their answers."""

import contextlib
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil

from grpo_devcluster.follow import JobView
from support.faults import CONTROLLER_PORT, main_process, until

_OTHERS = 3.0  # seconds in which the other engines answer all of their requests


def exported(url: str, name: str) -> int:
    """Return the value of ``grpo_rollout_NAME``. ``url``: see ``metrics_of``."""
    text = httpx.get(url, timeout=5).text
    (value,) = re.findall(rf"^grpo_rollout_{name} (\S+)$", text, re.MULTILINE)
    return int(float(value))


def metrics_of(job: JobView) -> str:
    """Return the URL of what the controller exports about the job's samples."""
    (pod,) = job.pods("controller")
    return f"http://{pod['status']['podIP']}:{CONTROLLER_PORT}/metrics"


def engines_of(job: JobView, step: int) -> set[str]:
    """Return the engines whose samples a step was trained on, as the ledger has them."""
    lines = [json.loads(line) for line in (job.store() / "ledger.jsonl").read_text().splitlines()]
    return {line["engine"] for line in lines if line["step"] == step}


@contextlib.contextmanager
def samples_held(pod: dict[str, Any], url: str) -> Iterator[int]:
    """Let an engine hold samples while the context is open; yield their number.

    Its server and its agent go on. ``url``: see ``metrics_of``.
    """
    scheduler = _scheduler(pod)
    try:
        yield until("the engine holds samples", lambda: _hold(scheduler, url), 120)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            scheduler.resume()


def _hold(scheduler: psutil.Process, url: str) -> int:
    """Stop the scheduler in the middle of a step; return how many samples wait for it.

    If none does, it goes on.
    """
    until("samples in flight", lambda: exported(url, "in_flight"), 60, every=0.005)
    scheduler.suspend()
    time.sleep(_OTHERS)
    held = exported(url, "in_flight")
    if not held:
        scheduler.resume()
    return held


def _scheduler(pod: dict[str, Any]) -> psutil.Process:
    """Return the process of an engine that computes its tokens."""
    server = psutil.Process(main_process(pod, "engine"))
    (found,) = [p for p in server.children(recursive=True) if "sglang::scheduler" in "".join(p.cmdline())]
    return found
