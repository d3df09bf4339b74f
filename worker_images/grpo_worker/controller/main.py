"""Entry point of the controller pod: ``grpo-controller``."""

import logging
import signal
import time
from pathlib import Path

import ray

from grpo_operator.api.data import DataSpec
from grpo_operator.api.status import Phase
from grpo_worker.controller.config import JobConfig, load_job_config
from grpo_worker.controller.loop import GrpoLoop
from grpo_worker.controller.progress import Board
from grpo_worker.controller.server import application, serve_in_background
from grpo_worker.controller.trainers import TrainerGang
from grpo_worker.data.source import PromptSource
from grpo_worker.data.tasks import SCHEME, Task, open_gym
from grpo_worker.data.tokenizer import TextTokenizer, load_tokenizer
from grpo_worker.megatron.families.known import expert_layers
from grpo_worker.megatron.presets import model_config
from grpo_worker.rewards.manager import RewardManager
from grpo_worker.rewards.verifiers import verifier_of
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.pool import RolloutPool

log = logging.getLogger(__name__)
RAYLET_SECONDS = 600.0  # on a busy node Ray needs minutes to start


def main() -> None:
    """Run the job of ``/etc/grpo/job.json``, then answer status requests until stopped."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    config = load_job_config()
    board = Board()
    pool = RolloutPool(
        config.rollout_service,
        config.min_available,
        config.spec.weight_sync.timeout_seconds,
        config.writer,
        config.fp8,
    )
    serve_in_background(application(board, pool.table.entries))
    _connect(config.name)
    try:
        loop = build_loop(config, board, pool)
    except (ValueError, OSError) as error:  # what the job names is not there, or not what it should be
        board.update(phase=Phase.FAILED, message=str(error)[:1000])
    else:
        loop.run()
    log.info("job ended: %s", board.get().phase)
    signal.pause()


def _connect(namespace: str) -> None:
    """Join the Ray cluster, once the raylet that starts beside this process has."""
    deadline = time.monotonic() + RAYLET_SECONDS
    while True:
        try:
            ray.init(address="auto", namespace=namespace, log_to_driver=True)
            return
        except ConnectionError as error:
            if time.monotonic() > deadline:
                raise
            log.info("not yet: %s", error)


def build_loop(config: JobConfig, board: Board, pool: RolloutPool) -> GrpoLoop:
    """Wire the loop from the job's configuration."""
    spec = config.spec
    hf = model_config(spec.model.path)
    config.store.mkdir(parents=True, exist_ok=True)
    checkpoints = config.store / "checkpoints"
    board.update(checkpoint_location=str(checkpoints))
    tokenizer = load_tokenizer(spec.model.path, hf["eos_token_id"], hf["pad_token_id"])
    task = open_task(spec.data, tokenizer, spec.seed, config.store / "datasets")
    source = PromptSource(task, tokenizer, spec.data.prompt_length)
    reward = RewardManager(task, tokenizer, verifier_of(task, spec.reward))
    client = RolloutClient(
        pool.table,
        seed=spec.seed,
        n=spec.algorithm.samples_per_prompt,
        temperature=spec.algorithm.temperature,
        max_tokens=spec.data.response_length,
        eos_id=hf["eos_token_id"],
        timeout=spec.weight_sync.timeout_seconds * 4,
        experts=expert_layers(hf) if spec.algorithm.routing_replay else None,
        partial=spec.staleness.partial_rollouts,
    )
    trainers = TrainerGang(spec, hf, checkpoints)
    return GrpoLoop(spec, config.store, board, trainers, pool, client, source, tokenizer, reward)


def open_task(spec: DataSpec, tokenizer: TextTokenizer, seed: int, cache: Path) -> Task:
    """What ``data.train`` names. Raises ValueError that says what is wrong with it."""
    if spec.train.startswith(SCHEME):
        return open_gym(spec.train, seed)
    from grpo_worker.data.files import open_files  # imports pandas, which few jobs need

    return open_files(spec, tokenizer, seed, cache)


if __name__ == "__main__":
    main()
