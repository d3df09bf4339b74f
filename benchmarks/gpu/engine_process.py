"""An SGLang engine for benchmarks, started as a rollout pod starts it."""

import json
import os
import subprocess
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from grpo_operator.api.v1alpha1.rolloutpool import EngineSpec, RolloutTemplate
from grpo_operator.render.sglang_command import MODEL_DIRECTORY, engine_command
from grpo_worker.weightsync.agent.engine_client import Engine

REPO = Path(__file__).resolve().parents[2]
_GPU = [
    *("--attention-backend", "triton", "--grammar-backend", "none"),
    "--disable-cuda-graph",
    "--enforce-disable-flashinfer-allreduce-fusion",  # its kernels compile for four minutes
]


class EngineProcess:
    """An engine with dummy weights until it receives a version.

    ``gpus``: the GPUs that it sees; without any it runs on the CPU. ``weights``: a Hugging Face directory
    whose weights it loads instead. ``fields``: other fields of its EngineSpec. ENGINE_PYTHONPATH in the
    environment: its packages on a host with GPUs.
    """

    def __init__(
        self, folder: Path, model: dict[str, Any], port: int, gpus: tuple[int, ...] = (), fp8: bool = False,
        weights: Path | None = None, **fields: Any,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model))
        ranks = max(len(gpus), 1)
        defaults: dict[str, Any] = {
            "device": "cuda" if gpus else "cpu", "dtype": "bfloat16" if gpus else "float32",
            "context_length": 256, "max_total_tokens": 8192, "memory_fraction": 0.9,
            "tensor_parallel": ranks, "gpus_per_node": ranks, "expert_parallel": ranks,
            "quantization": "fp8-block128" if fp8 else "none", "extra_args": _GPU if gpus else [],
        }  # fmt: skip
        settings = defaults | fields
        if weights is not None:
            _link(weights, folder / "model")
            settings["extra_args"] = [*settings["extra_args"], "--load-format", "auto"]
        engine = EngineSpec(**settings)
        command = engine_command(str(folder), RolloutTemplate(engine=engine))
        command = command.replace(MODEL_DIRECTORY, str(folder / "model")).replace("30000", str(port))
        self.environment = _environment(folder, gpus)
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", command], env=self.environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.url, self.key = f"http://127.0.0.1:{port}", folder / "model" / "admin-key"

    def control(self, timeout: float) -> Engine:
        """Return a client of its control routes."""
        return Engine(self.url, timeout, self.key)

    def await_alive(self, deadline: float) -> None:
        """Wait for an answer. Raises RuntimeError if it ends or does not answer by ``deadline``."""
        while not self.control(5).alive():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the engine did not start: {self.log_tail()}")
            time.sleep(0.5)

    def log_probabilities(self) -> list[float]:
        """Return the log-probabilities of a few tokens that the engine generates greedily."""
        body = {
            "input_ids": list(range(1, 33)), "return_logprob": True,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True},
        }  # fmt: skip
        answer = httpx.post(f"{self.url}/generate", json=body, timeout=600).raise_for_status().json()
        return [row[0] for row in answer["meta_info"]["output_token_logprobs"]]

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of its processes so far."""
        own = psutil.Process(self.process.pid)
        times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
        return sum(time.user + time.system for time in times)

    def log_tail(self) -> str:
        """Return the end of its log."""
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if "GET /ping" not in line)[-5000:]

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
        self.process.wait()


def sampled(url: str, prompts: Sequence[list[int]], tokens: int, seed: int) -> list[dict[str, Any]]:
    """Return what the engine samples after each prompt.

    Each answer has the prompt, the output's token ids, their log-probabilities and, of an engine that drafts,
    the mean number of tokens of a verification. ``seed``: of the first prompt; those after it count up.
    """
    parameters = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}

    def one(number: int) -> dict[str, Any]:
        sampling = parameters | {"sampling_seed": seed + number}
        body = {"input_ids": prompts[number], "sampling_params": sampling, "return_logprob": True}
        answer = httpx.post(f"{url}/generate", json=body, timeout=300).raise_for_status().json()
        meta = answer["meta_info"]
        return {
            "prompt": prompts[number], "output": answer["output_ids"],
            "logprobs": [row[0] for row in meta["output_token_logprobs"]],
            "accepted": meta.get("spec_accept_length"),
        }  # fmt: skip

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(one, range(len(prompts))))


def _link(weights: Path, folder: Path) -> None:
    """Link the files of the weights into the directory that the engine's model is read from."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in weights.glob("model*.safetensors*"):
        link = folder / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file.resolve())


def _environment(folder: Path, gpus: tuple[int, ...]) -> dict[str, str]:
    if not gpus:
        from grpo_devcluster.cpu_engine import environment  # needs the devcluster's cache

        return environment(folder)
    sources = [entry_points(folder), REPO / "operator", REPO / "worker_images"]
    path = os.pathsep.join([*map(str, sources), os.environ.get("ENGINE_PYTHONPATH", "")])
    visible = ",".join(map(str, gpus))
    own = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": "1"}
    own["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "false"  # trainer ranks share some of the GPUs
    return dict(os.environ) | own


def entry_points(folder: Path) -> Path:
    """Write the entry points by which SGLang finds the plugins of a checkout that is not installed."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    metadata = folder / "plugins" / f"{project['name'].replace('-', '_')}-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: 0\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {place}" for name, place in points.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return metadata.parent
