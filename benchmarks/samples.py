"""``make bench-samples``: seconds and bytes of a step's samples at the size of 512 GPUs.

The job's own writer writes 8 192 samples of 4 301 tokens on average, log-normal and cut at 14 336, with
DeepSeek-V3's tokenizer, as reduced for the tests: texts of random ids. It runs beside the next step; the
share is its CPU time, of the step that the rehearsal expects. Adds to benchmarks/results/experience.json.
"""

import json
import tempfile
import time
from pathlib import Path

import numpy as np

from grpo_devcluster.paths import REPO
from grpo_devcluster.results import RESULTS, record
from grpo_operator.api.v1alpha1.observability import SamplesSpec
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.common.store_path import JobFolder
from grpo_worker.data.prompts import Prompt
from grpo_worker.data.tokenizer import TextTokenizer, load_tokenizer
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import Sample
from grpo_worker.rollout.train_batch import make_batch
from grpo_worker.samples.writer import SampleWriter

PROMPTS, ANSWERS, PROMPT_TOKENS = 512, 16, 614
MEAN, SIGMA, LONGEST = 4301, 0.8, 14336
TOKENIZER = REPO / "tests" / "support" / "published_models" / "snapshots" / "tokenizers" / "deepseek-v3"


def main() -> None:
    """Measure one step and record it."""
    tokenizer = load_tokenizer(str(TOKENIZER))
    rollouts = _rollouts(tokenizer)
    batch = _batch(rollouts)
    step = json.loads((RESULTS / "rehearsal.json").read_text())["figures"]["step_seconds_predicted_512"]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        writer = SampleWriter(JobFolder(place, place), SamplesSpec(), tokenizer.decode_all, lambda: None)
        began, cpu = time.monotonic(), time.process_time()
        writer.add(1, 1, rollouts, rollouts.scores, batch)
        called = time.monotonic() - began
        writer.flush()
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        (file,) = (place / "samples").glob("*.parquet")
        assert writer.metrics()["samples/missing_steps"] == 0
        figures = {
            "sample_store_tokens_512": int(batch.response_lengths.sum()),
            "sample_store_gigabytes_512": round(file.stat().st_size / 1e9, 3),
            "sample_store_seconds_512": round(seconds, 1),
            "sample_store_cpu_seconds_512": round(cpu, 1),
            "sample_store_call_milliseconds_512": round(1000 * called, 1),
            "sample_store_overhead_pct": round(100 * cpu / step, 2),
        }
    print(json.dumps(figures, indent=1))
    record("experience", figures)


def _rollouts(tokenizer: TextTokenizer) -> RolloutBatch:
    random = np.random.default_rng(1)
    known = int(tokenizer.decoder.tokenizer.get_vocab_size())
    lengths = np.exp(random.normal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, PROMPTS * ANSWERS))
    lengths = np.clip(lengths, 1, LONGEST).astype(int)
    prompts = [
        Prompt(index, tuple(random.integers(0, known, PROMPT_TOKENS).tolist())) for index in range(PROMPTS)
    ]
    samples = [
        Sample(
            row // ANSWERS, row % ANSWERS, random.integers(0, known, length).tolist(),
            (-random.exponential(0.3, length)).tolist(), 6, f"engine-{row % 8}",
        )
        for row, length in enumerate(lengths)
    ]  # fmt: skip
    scores = random.integers(0, 2, len(samples)).astype(float).tolist()
    return RolloutBatch(prompts, samples, scores, prompts)


def _batch(rollouts: RolloutBatch) -> RaggedBatch:
    batch = make_batch(rollouts.prompts, rollouts.samples)
    noise = np.random.default_rng(2).normal(0, 0.01, int(batch.response_lengths.sum())).astype(np.float32)
    batch = batch.with_columns(old_log_probs=batch.response["rollout_log_probs"] + noise)
    return batch.with_rows(advantages=np.zeros(batch.rows, np.float32))


if __name__ == "__main__":
    main()
