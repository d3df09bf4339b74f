"""A job on one host without Kubernetes: the processes of its pods, with the operator's commands.

Ray, the trainer's agent and the controller listen at 127.0.0.2, the engine and its agent at 127.0.0.1, so
that both agents keep their port.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from engine_process import entry_points

from grpo_operator.api.base import Device
from grpo_operator.api.job_config import JobConfig
from grpo_operator.api.messages import ProfileOrder, ProfileReport
from grpo_operator.api.names import AGENT_PORT, CONTROLLER_PORT, ENGINE_PORT, GCS_PORT
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.plan.weight_path import job_weight_path
from grpo_operator.render.sglang_command import ADMIN_KEY, MODEL_DIRECTORY, TURNS, engine_command

REPO = Path(__file__).resolve().parents[2]
TRAINER_HOST, ENGINE_HOST = "127.0.0.2", "127.0.0.1"
_RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class LocalJob:
    """Engine, agents and Ray, for consecutive jobs with the same engine and trainer pool.

    ``engine_path``: PYTHONPATH of the engine, whose packages may differ from the trainer's.
    """

    def __init__(self, folder: Path, spec: GRPOJobSpec, engine_path: str = "") -> None:
        self._folder = folder
        self._spec = spec
        self._cuda = spec.trainer.device is Device.CUDA
        self._weights = Path("/dev/shm/grpo-weights")
        self._experts = Path("/dev/shm/grpo-routed-experts")
        template = spec.rollout.template
        self._routes = template is not None and template.engine.return_routed_experts
        self.profiles: list[ProfileReport] = []
        self._running: list[subprocess.Popen[bytes]] = []
        self._sources = os.pathsep.join(str(REPO / part) for part in ("operator", "worker_images"))
        self._engine_path = engine_path or os.environ.get("PYTHONPATH", "")

    def __enter__(self) -> "LocalJob":
        self._folder.mkdir(parents=True, exist_ok=True)
        self._weights.mkdir(exist_ok=True)
        try:
            self._start_all()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def _start_all(self) -> None:
        self._start_engine()
        self._start_ray()
        agent = [sys.executable, "-m", "grpo_worker.weightsync.main"]
        trainer = ["trainer", "--host", TRAINER_HOST, "--weights", str(self._weights)]
        config = f"{MODEL_DIRECTORY}/config.json"
        rollout = ["rollout", "--host", ENGINE_HOST, "--name", "engine-0", "--model-config", config]
        rollout += [
            "--admin-key",
            ADMIN_KEY,
            *(["--routed-experts", str(self._experts)] if self._routes else []),
        ]
        self._start("trainer-agent", [*agent, *trainer])
        shared = self._spec.shares_gpus
        self._start("rollout-agent", [*agent, *rollout, *(["--turns", TURNS] if shared else [])])
        if not shared:  # otherwise it starts when the controller gives it the GPUs
            self._await(f"http://{ENGINE_HOST}:{ENGINE_PORT}/ping", 400)
        self._await(f"http://{ENGINE_HOST}:{AGENT_PORT}/healthz", 60)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._show_logs()
        for process in reversed(self._running):
            _kill(process)
        shutil.rmtree(self._experts, ignore_errors=True)
        for path in sorted(self._weights.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()

    def run(
        self, name: str, spec: GRPOJobSpec, timeout: float = 500, orders: Sequence[ProfileOrder] = ()
    ) -> list[dict[str, Any]]:
        """Run one job to its end and return the metrics of its steps.

        ``orders``: profiles, which are ordered when it begins to train; ``profiles`` then has their reports.
        """
        store = self._folder / name
        file = self._folder / f"{name}.json"
        assert spec.rollout.template is not None, "the job has engines of its own"
        config = JobConfig(
            name=name,
            namespace="default",
            spec=spec,
            rollout_service=ENGINE_HOST,
            min_available=1,
            max_running_requests=spec.rollout.template.engine.max_running_requests,
            fp8=False,
            weight_path=job_weight_path(spec, spec.rollout.template),
            writer=name,
            store=store,
        )
        file.write_text(json.dumps(config.wire()))
        httpx.post(f"http://{ENGINE_HOST}:{AGENT_PORT}/v1/writer", json={"writer": name}, timeout=60)
        command = [sys.executable, "-m", "grpo_worker.controller.main"]
        env = _RAY | {"GRPO_JOB_FILE": str(file), "RAY_ADDRESS": f"{TRAINER_HOST}:{GCS_PORT}"}
        controller = self._start(f"controller-{name}", command, env)
        try:
            self._follow(controller, timeout, orders)
        finally:
            _kill(controller)
        return [json.loads(line) for line in (store / "metrics.jsonl").read_text().splitlines()]

    def _follow(
        self, controller: subprocess.Popen[bytes], timeout: float, orders: Sequence[ProfileOrder]
    ) -> None:
        deadline = time.monotonic() + timeout
        body = {"orders": [order.wire() for order in orders]}
        while time.monotonic() < deadline:
            assert controller.poll() is None, "the controller ended"
            try:
                status = httpx.get(f"http://127.0.0.1:{CONTROLLER_PORT}/v1/status", timeout=5).json()
            except httpx.HTTPError:
                status = {"phase": ""}
            if status["phase"] == "Training" and body["orders"]:
                httpx.post(f"http://127.0.0.1:{CONTROLLER_PORT}/v1/profile", json=body).raise_for_status()
                body["orders"] = []
            self.profiles = [ProfileReport.model_validate(entry) for entry in status.get("profiles", ())]
            if status["phase"] == "Succeeded":
                return
            assert status["phase"] not in ("Failed", "Recovering"), status["message"]
            time.sleep(0.5)
        raise TimeoutError(f"the job did not end in {timeout:.0f} s")

    def _start_engine(self) -> None:
        turns = self._spec.shares_gpus
        template = self._spec.rollout.template
        assert template is not None, "the job has engines of its own"
        command = engine_command(self._spec.model.path, template, turns)
        path = [str(entry_points(self._folder)), self._sources, self._engine_path]
        env = {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": "0"}
        if self._routes:
            url = f"http://{ENGINE_HOST}:{AGENT_PORT}"
            env |= {"GRPO_ROUTED_EXPERTS": str(self._experts), "GRPO_ROUTED_EXPERTS_URL": url}
        if not self._cuda:
            from grpo_devcluster.cpu_engine import environment  # needs the devcluster's cache

            env = environment(self._folder) | env
        self._start("engine", ["bash", "-c", command], env)

    def _start_ray(self) -> None:
        world = self._spec.trainer.nodes * self._spec.trainer.gpus_per_node
        command = [
            sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head",
            "--block",
            f"--node-ip-address={TRAINER_HOST}", f"--port={GCS_PORT}", "--include-dashboard=false",
            "--num-cpus=8", f"--num-gpus={world if self._cuda else 0}",
            f"--resources={json.dumps({'trainer': world})}",
        ]  # fmt: skip
        first = 0 if self._spec.shares_gpus else 1
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(str(first + gpu) for gpu in range(world))}
        env = _RAY | {"GRPO_WEIGHTS_DIR": str(self._weights)} | (visible if self._cuda else {})
        self._start("ray", command, env)
        time.sleep(8)

    def _start(self, name: str, command: list[str], env: dict[str, str] | None = None) -> Any:
        path = os.pathsep.join([self._sources, os.environ.get("PYTHONPATH", "")])
        log = (self._folder / f"{name}.log").open("wb")
        process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | (env or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._running.append(process)
        return process

    def _await(self, url: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                if httpx.get(url, timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            ended = [process.args for process in self._running if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"{url} does not answer; processes that ended: {ended}")
            time.sleep(1)

    def _show_logs(self) -> None:
        for log in sorted(self._folder.glob("*.log"), key=lambda file: file.stat().st_mtime):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
