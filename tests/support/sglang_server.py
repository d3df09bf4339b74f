"""A stock SGLang server on a model directory, without anything of this project."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from grpo_devcluster.cpu_engine import environment

PORT = 30100


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[str]:
    """Serve ``model`` with its weights and tokenizer; yield the base URL. ``folder``: for the log."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu",
        "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
        "--grammar-backend", "none", "--disable-overlap-schedule", "--context-length", "512",
        "--max-total-tokens", "8192", "--skip-server-warmup", "--port", str(PORT),
    ]  # fmt: skip
    log = folder / "sglang.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment(folder), stdout=output, stderr=output, start_new_session=True
        )
    try:
        _await(process, log)
        yield f"http://127.0.0.1:{PORT}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await(process: "subprocess.Popen[bytes]", log: Path) -> None:
    while True:  # bounded by the test's own limit
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(f"http://127.0.0.1:{PORT}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)


def greedy(url: str, ids: list[int], tokens: int) -> list[int]:
    """Return the greedy continuation."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    }
    response = httpx.post(f"{url}/generate", json=body, timeout=120)
    response.raise_for_status()
    return list(response.json()["output_ids"])


def chat(url: str, text: str) -> dict[str, Any]:
    """Return one answer of the OpenAI API, which needs tokenizer and chat template."""
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "temperature": 0,
    }
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    response.raise_for_status()
    return dict(response.json())
