"""Entry point of the controller pod: ``grpo-controller``."""

import logging
import signal

import ray

from grpo_worker.controller.config import JobConfig, load_job_config
from grpo_worker.controller.loop import GrpoLoop
from grpo_worker.controller.progress import Board
from grpo_worker.controller.server import application, serve_in_background
from grpo_worker.controller.trainers import TrainerGang
from grpo_worker.data.source import PromptSource
from grpo_worker.data.tasks import open_task
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.megatron.presets import model_config
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.pool import RolloutPool

log = logging.getLogger(__name__)


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
    )
    serve_in_background(application(board, pool.table.entries))
    ray.init(address="auto", namespace=config.name, log_to_driver=True)
    build_loop(config, board, pool).run()
    log.info("job ended: %s", board.get().phase)
    signal.pause()


def build_loop(config: JobConfig, board: Board, pool: RolloutPool) -> GrpoLoop:
    """Wire the loop from the job's configuration."""
    spec = config.spec
    hf = model_config(spec.model.path)
    config.store.mkdir(parents=True, exist_ok=True)
    checkpoints = config.store / "checkpoints"
    board.update(checkpoint_location=str(checkpoints))
    tokenizer = load_tokenizer(spec.model.path, hf["eos_token_id"], hf["pad_token_id"])
    source = PromptSource(open_task(spec.data.train, spec.seed), tokenizer, spec.data.prompt_length)
    client = RolloutClient(
        pool.table,
        seed=spec.seed,
        n=spec.algorithm.samples_per_prompt,
        temperature=spec.algorithm.temperature,
        max_tokens=spec.data.response_length,
        eos_id=hf["eos_token_id"],
        timeout=spec.weight_sync.timeout_seconds * 4,
    )
    trainers = TrainerGang(spec, hf, checkpoints)
    return GrpoLoop(spec, config.store, board, trainers, pool, client, source, tokenizer)


if __name__ == "__main__":
    main()
