"""Prefill and decode speed of an engine by the number of sequences that run at once.

    CUDA_HOME=... ENGINE_PYTHONPATH=... python3 benchmarks/gpu/engine_speed.py engine.json

The estimate of a step (``grpo-plan``) predicts these seconds from published bandwidths and fitted
efficiencies; benchmarks/planner.py compares them. Engines have dummy weights: the time of a token does not
depend on values.
"""

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from engine_process import EngineProcess
from models import ENGINE_MODELS

from grpo_devcluster.results import stamp, write_raw

PROMPT, SHORT, LONG = 512, 64, 576  # tokens of a prompt, and of a short and a long answer
RUNNING = (1, 8, 32, 128, 256)
PORT = 31000
_GPU = ["--attention-backend", "triton", "--grammar-backend", "none"]
_START_SECONDS = 280


async def _generate(url: str, count: int, tokens: int, vocabulary: int, seed: int) -> float:
    """Return the seconds in which ``count`` prompts that share nothing get ``tokens`` tokens each."""
    numbers = random.Random(seed)
    prompts = [[numbers.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(count)]
    parameters = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:

        async def one(ids: list[int]) -> None:
            body = {"input_ids": ids, "sampling_params": parameters, "return_logprob": True}
            answer = await client.post(f"{url}/generate", json=body)
            answer.raise_for_status()
            assert len(answer.json()["output_ids"]) == tokens

        started = time.monotonic()
        await asyncio.gather(*map(one, prompts))
        return time.monotonic() - started


def measure(url: str, vocabulary: int) -> list[dict[str, Any]]:
    """Return a row for each number of sequences; of two rounds the faster one.

    The time of a token is the slope between a short and a long answer, so that prefill is not part of it.
    """
    asyncio.run(_generate(url, 8, 16, vocabulary, 0))  # compiles what later rounds use
    rows = []
    for count in RUNNING:
        asyncio.run(_generate(url, count, 4, vocabulary, 10 * count))
        first, short, long = (
            min(asyncio.run(_generate(url, count, n, vocabulary, 10 * count + n + k)) for k in (1, 2))
            for n in (1, SHORT, LONG)
        )
        row = {
            "running": count,
            "prompt": PROMPT,
            "context": PROMPT + (SHORT + LONG) / 2,
            "prefill_seconds": round(first, 5),
            "decode_seconds_per_token": round((long - short) / (LONG - SHORT), 6),
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--only", choices=ENGINE_MODELS, help="measure one model")
    args = parser.parse_args()
    engines, cases, failed = {}, {}, []
    for number, name in enumerate([args.only] if args.only else ENGINE_MODELS):
        # One after the other: two engines on a GPU would slow each other down.
        engine = EngineProcess(
            Path("/tmp") / f"engine-{number}", ENGINE_MODELS[name], PORT + number, (0,),
            context_length=4096, max_total_tokens=320 * 1024, max_running_requests=256, memory_fraction=0.85,
            deterministic=False, extra_args=_GPU,
        )  # fmt: skip
        engines[name] = engine
        try:
            engine.await_alive(time.monotonic() + _START_SECONDS)
            cases[name] = measure(engine.url, ENGINE_MODELS[name]["vocab_size"])
        except (RuntimeError, httpx.HTTPError) as error:
            print(f"--- {name}: {error!r}\n{engine.log_tail()}", flush=True)
            failed.append(name)
        finally:
            engine.stop()
    write_raw(args.result, stamp(f"1 x {torch.cuda.get_device_name()}"), cases=cases, failed=failed)
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
