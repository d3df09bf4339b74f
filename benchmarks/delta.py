"""``make bench-delta``: a new weight version over a 10 Gb/s line, in full and as a delta.

The trainer's agent runs in its own network namespace, behind a pair of interfaces that tc limits to 10 Gb/s.
The other end pulls a version of one rank in three ways: in full over HTTP, in full over NIXL's TCP, and as a
delta when 2 % of the bytes changed. The rank finds the changes while it computes the digest of a version, so
both ways of publishing are measured too. Both ends share the cores of this machine. Needs root; adds to
benchmarks/results/sync.json.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from prometheus_client import REGISTRY

from grpo_devcluster.results import record
from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.http_reader import FetchError
from grpo_worker.weightsync.agent.whole_blobs import WholeBlobs
from grpo_worker.weightsync.trainer.publisher import publish
from grpo_worker.weightsync.transport.nixl.importer import Importer

NAMESPACE, NEAR, FAR = "grpo-delta", "10.231.7.1", "10.231.7.2"
SIZE, CHANGED, ROUNDS, RATE = 1 << 30, 0.02, 8, "10gbit"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def line() -> Iterator[None]:
    """Create two interfaces with RATE between them, one of them in its own namespace."""
    subprocess.run(["ip", "netns", "delete", NAMESPACE], check=False, stderr=subprocess.DEVNULL)
    _ip("netns", "add", NAMESPACE)
    try:
        _ip("link", "add", "grpo-near", "type", "veth", "peer", "name", "grpo-far", "netns", NAMESPACE)
        _ip("address", "add", f"{NEAR}/30", "dev", "grpo-near")
        _ip("link", "set", "grpo-near", "up")
        for command in (
            ["ip", "address", "add", f"{FAR}/30", "dev", "grpo-far"],
            ["ip", "link", "set", "grpo-far", "up"],
            ["ip", "link", "set", "lo", "up"],  # NIXL connects to itself over it
            ["tc", "qdisc", "add", "dev", "grpo-far", "root", "tbf", "rate", RATE,
             "burst", "4mb", "latency", "50ms"],
        ):  # fmt: skip
            subprocess.run(["ip", "netns", "exec", NAMESPACE, *command], check=True)
        yield
    finally:
        subprocess.run(["ip", "netns", "delete", NAMESPACE], check=False)


@contextmanager
def agent(weights: Path) -> Iterator[dict[int, str]]:
    """Start the trainer's agent at the far end."""
    command = [sys.executable, "-m", "grpo_worker.weightsync.main", "trainer", "--weights", str(weights)]
    process = subprocess.Popen(["ip", "netns", "exec", NAMESPACE, *command, "--host", FAR])
    sources = {0: f"http://{FAR}:9000"}
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                Fetcher(5).manifests(sources, 1)
                break
            except FetchError:
                assert time.monotonic() < deadline, "the agent does not answer"
                time.sleep(0.5)
        yield sources
    finally:
        process.terminate()
        process.wait()


def next_version(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return weights with the share CHANGED of the bytes changed, each the low byte of another bf16."""
    generator = torch.Generator().manual_seed(seed)
    words = tensor.view(torch.int16).clone()
    where = torch.randint(0, len(words), (int(SIZE * CHANGED),), generator=generator)
    words[where] ^= 1 + torch.randint(0, 255, (len(where),), generator=generator, dtype=torch.int16)
    return words.view(torch.bfloat16)


def pull(whole: WholeBlobs, sources: dict[int, str], version: int) -> float:
    """Return the seconds until the version has arrived and its digest was checked."""
    started = time.monotonic()
    whole.fetch(sources, Fetcher(300).manifests(sources, version))
    return time.monotonic() - started


def published(root: Path, version: int, tensor: torch.Tensor, deltas: bool) -> float:
    """Return the seconds until the agent can read the version."""
    started = time.monotonic()
    publish(root, version, 0, 1, [("w", (SIZE // 2,), 0, 0, tensor)], deltas)
    return time.monotonic() - started


def measure(weights: Path) -> dict[str, float]:
    tensor = torch.randn(SIZE // 2).to(torch.bfloat16)
    ways = ("full", "delta", "nixl", "publish", "publish_delta")
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    received: dict[str, int] = {}
    root, other = weights / "deltas", weights / "whole"
    for each in (root, other):
        published(each, 1, tensor, False)
    with line(), agent(root) as sources:
        pullers = {"full": WholeBlobs(300), "delta": WholeBlobs(300, deltas=True)}
        pullers["nixl"] = WholeBlobs(300, importer=Importer())
        for whole in pullers.values():
            pull(whole, sources, 1)
        for version in range(2, 3 + ROUNDS):
            tensor = next_version(tensor, version)
            seconds["publish"].append(published(other, version, tensor, False))
            seconds["publish_delta"].append(published(root, version, tensor, True))
            for name, puller in pullers.items():
                seconds[name].append(pull(puller, sources, version))
                received[name] = puller.received
            blobs = [puller._blobs[0] for puller in pullers.values()]
            assert all(np.array_equal(blobs[0], blob) for blob in blobs)
    assert REGISTRY.get_sample_value("grpo_weight_nixl_reads_total", {"outcome": "fallback"}) == 0
    # The first round compiles.
    full, delta, nixl, plain, both = (statistics.median(times[1:]) for times in seconds.values())
    return {
        "publish_seconds": plain,
        "publish_delta_seconds": both,
        "delta_speedup_with_publishing": (plain + full) / (both + delta),
        "nixl_tcp_seconds_10g": nixl,
        "delta_speedup_10g": full / delta,
        "delta_seconds_10g": delta,
        "full_seconds_10g": full,
        "delta_bytes_share": received["delta"] / received["full"],
    }


def main() -> None:
    os.environ["UCX_TLS"] = (
        "tcp"  # on one host UCX would otherwise copy between processes and bypass the line
    )
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        figures = measure(Path(name))
    print(json.dumps(figures, indent=1))
    record("sync", {key: round(value, 4) for key, value in figures.items()})


if __name__ == "__main__":
    main()
