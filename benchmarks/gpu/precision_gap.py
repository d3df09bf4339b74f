"""Cases of precision.py about engines: what they sample, and the trainer's log-probabilities of it."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from engine_process import EngineProcess, sampled
from precision_data import Chain
from precision_figures import PRECISIONS, gap

PROMPTS, PROMPT, TOKENS = 64, 32, 256
PORT, START_SECONDS = 31000, 280
GPUS: tuple[int, ...] = (0,)


def sample(engine: str, folder: Path) -> dict[str, Any]:
    """Let an engine with the exported weights of a precision continue sequences, and keep its answers."""
    exported, kept = folder / "model" / engine, _answers(engine, folder)
    if not exported.is_dir():
        raise FileNotFoundError(f"there is no {exported}: run 'curve bf16' with this folder first")
    kept.unlink(missing_ok=True)
    model = json.loads((exported / "config.json").read_text())
    process = EngineProcess(
        folder / f"engine-{engine}", model, PORT + PRECISIONS.index(engine), GPUS, engine == "fp8", exported,
        context_length=2 * (PROMPT + TOKENS), max_total_tokens=2 * PROMPTS * (PROMPT + TOKENS),
        max_running_requests=PROMPTS, memory_fraction=0.5,
    )  # fmt: skip
    try:
        process.await_alive(time.monotonic() + START_SECONDS)
        prompts = Chain(model["vocab_size"]).sequences(PROMPTS, PROMPT, 0).tolist()
        answers = sampled(process.url, prompts, TOKENS, 0)
    except Exception:
        print(f"--- engine in {engine}: {process.log_tail()}", flush=True)
        raise
    finally:
        process.stop()
    kept.write_text(json.dumps(answers))
    return {"tokens": PROMPTS * TOKENS, "logprob_mean": float(_log_probs(answers).mean())}


def answers_of_engines(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the kept answers by precision of the engine."""
    files = {engine: _answers(engine, folder) for engine in PRECISIONS}
    return {engine: json.loads(file.read_text()) for engine, file in files.items() if file.exists()}


def gaps(folder: Path, trainer: Callable[[str], dict[str, list[float]]]) -> dict[str, Any]:
    """Return the gap of each pair of precisions, that of the trainer first in its name.

    ``trainer``: a precision -> by engine, the trainer's log-probabilities of the engine's answers.
    """
    engines = {engine: _log_probs(answers) for engine, answers in answers_of_engines(folder).items()}
    if not engines:
        raise FileNotFoundError(
            f"{folder} has no answers of an engine: run 'engine bf16' and 'engine fp8' first"
        )
    trainers = {name: trainer(name) for name in PRECISIONS}
    return {
        f"{name}_{engine}": gap(np.array(found[engine]), theirs)
        for name, found in trainers.items()
        for engine, theirs in engines.items()
    }


def _log_probs(answers: list[dict[str, Any]]) -> np.ndarray:
    return np.concatenate([answer["logprobs"] for answer in answers])


def _answers(engine: str, folder: Path) -> Path:
    return folder / f"answers-{engine}.json"
