"""Engines that draft tokens, beside one that does not, before and after an update of both models.

    CUDA_HOME=... ENGINE_PYTHONPATH=... python3 benchmarks/gpu/draft.py draft.json

One GPU. A trainer rank sends two versions by CUDA IPC to an engine that drafts and to one that does not, and
the second version alone to an engine that drafts and was just started. The weights are drawn so that a layer
drafts well for the model of its own version only. The exit status is 1 unless

* the plain engine computes the same log-probabilities for the tokens that the drafting engine sampled;
* both engines sample tokens of the same mean log-probability;
* after the update the drafts are accepted as often as those of the engine that was just started, and well.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from engine_process import EngineProcess, sampled
from models import JOB_MODEL
from sync import Case, Link
from sync_ranks import Processes

from grpo_devcluster.results import stamp, write_raw
from grpo_operator.api.weight_path import Backend
from grpo_worker.weightsync.agent.agent import Agent

MODEL = JOB_MODEL | {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
VERSIONS = {"drafting": (1, 2), "plain": (1, 2), "fresh": (2,)}  # that each engine receives
PROMPTS, PROMPT, TOKENS, STEPS = 64, 32, 256, 3
BUCKET, PORT, START_SECONDS = 64 << 20, 31000, 280
# bf16: the same token is computed in batches of other shapes.
LARGEST_GAP, MEAN_GAP, ACCEPTED_GAP, GOOD = 1.0, 0.05, 0.1, 1.2


def generate(url: str, seed: int) -> list[dict[str, Any]]:
    """Return the tokens, log-probabilities and accepted length of sampled answers to drawn prompts."""
    numbers = random.Random(seed)
    prompts = [[numbers.randrange(3, MODEL["vocab_size"]) for _ in range(PROMPT)] for _ in range(PROMPTS)]
    return sampled(url, prompts, TOKENS, seed * PROMPTS)


def recomputed(url: str, answer: dict[str, Any]) -> list[float]:
    """Return the engine's log-probabilities of an answer's tokens, computed in one pass."""
    body = {
        "input_ids": answer["prompt"] + answer["output"], "return_logprob": True,
        "logprob_start_len": PROMPT - 1, "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
    }  # fmt: skip
    rows = _post(f"{url}/generate", body)["meta_info"]["input_token_logprobs"]
    return [row[0] for row in rows][-len(answer["output"]) :]


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(url, json=body, timeout=300)
    response.raise_for_status()
    return dict(response.json())


def compare(drafting: list[dict[str, Any]], plain: list[dict[str, Any]], url: str) -> dict[str, float]:
    """Compare the samples of both engines, with ``url`` of the plain one."""
    gaps = [
        abs(ours - theirs)
        for answer in drafting
        for ours, theirs in zip(answer["logprobs"], recomputed(url, answer), strict=True)
    ]
    means = [[statistics.fmean(answer["logprobs"]) for answer in each] for each in (drafting, plain)]
    error = sum(statistics.variance(values) / len(values) for values in means) ** 0.5
    return {
        "largest_logprob_gap": max(gaps),
        "mean_logprob_gap": statistics.fmean(gaps),
        "mean_logprob_z": abs(statistics.fmean(means[0]) - statistics.fmean(means[1])) / max(error, 1e-9),
        "accepted": accepted(drafting),
    }


def accepted(answers: list[dict[str, Any]]) -> float:
    """Return the mean number of tokens of a verification; 1 if no draft is ever accepted."""
    return statistics.fmean(answer["accepted"] for answer in answers)


def measure(engines: dict[str, EngineProcess], ranks: Processes) -> dict[str, Any]:
    links = {}
    for name, engine in engines.items():
        agent = Agent(name, engine.control(60), 1, BUCKET, 120, "bench")
        agent.watch()
        case = Case(name, MODEL, False, (0,), (0,), False, 0, Backend.CUDA_IPC)
        links[name] = Link(case, agent, ranks, BUCKET)
    found: dict[str, Any] = {}
    for version in (1, 2):
        for name, link in links.items():
            if version in VERSIONS[name]:
                if not link.name:
                    link.open()
                link.version(version)
        url = engines["plain"].url
        answers = {name: generate(engines[name].url, version) for name in ("drafting", "plain")}
        found[f"version {version}"] = compare(answers["drafting"], answers["plain"], url)
    found["accepted_by_fresh"] = accepted(generate(engines["fresh"].url, 2))
    return found


def failures(found: dict[str, Any]) -> list[str]:
    """Return what is not as it should be."""
    wrong = []
    for version in ("version 1", "version 2"):
        row = found[version]
        if row["largest_logprob_gap"] > LARGEST_GAP or row["mean_logprob_gap"] > MEAN_GAP:
            wrong.append(f"{version}: the log-probabilities are not those of the plain engine")
        if row["mean_logprob_z"] > 4:
            wrong.append(f"{version}: the samples are not distributed as those of the plain engine")
        if row["accepted"] < GOOD:
            wrong.append(f"{version}: drafts are rejected, as if their layer had other weights")
    if abs(found["version 2"]["accepted"] - found["accepted_by_fresh"]) > ACCEPTED_GAP:
        wrong.append("drafts are accepted more or less often than those of an engine just started")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    args = parser.parse_args()
    origin, engines = stamp(f"1 x {torch.cuda.get_device_name()}"), {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = Processes(1, ["cuda:0"], MODEL, False)
        try:
            for number, name in enumerate(VERSIONS):  # one after the other: SGLang measures the free memory
                drafts: dict[str, Any] = (
                    {} if name == "plain" else {"speculative": "mtp", "speculative_num_steps": STEPS}
                )
                engine = EngineProcess(
                    Path(folder) / name, MODEL, PORT + 100 * number, (0,), context_length=1024,
                    max_total_tokens=PROMPTS * 512, max_running_requests=PROMPTS, memory_fraction=0.5,
                    deterministic=False, **drafts,
                )  # fmt: skip
                engines[name] = engine
                engine.await_alive(time.monotonic() + START_SECONDS)
            found = measure(engines, ranks)
        except Exception:
            for name, engine in engines.items():
                print(f"--- {name}: {engine.log_tail()}", flush=True)
            raise
        finally:
            for engine in engines.values():
                engine.stop()
            ranks.end()
    wrong = failures(found)
    print(found, flush=True)
    write_raw(args.result, origin, **found, failed=wrong)
    if wrong:
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
