"""``python -m sglang.bench_serving`` on given token ids and lengths, beside our own rollout."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_worker.model_files.names import TINY_TOKENIZER

# Options beyond those of every run. ``plain``: as its users run it, a part of the stream for each token.
VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "whole answers": ["--disable-stream"],
}
_TIMEOUT = 300.0


class ServingBaseline:
    """Runs of bench_serving against one engine.

    ``environment``: of the engine's packages. ``concurrency``: requests in flight.
    """

    def __init__(self, folder: Path, port: int, environment: Mapping[str, str], concurrency: int) -> None:
        self._folder, self._port, self._concurrency = folder, port, concurrency
        folder.mkdir(parents=True, exist_ok=True)
        self._environment = dict(environment)
        self._tokenizer = _write_tokenizer(folder / "tokenizer")
        self._add_missing_packages()

    def run(self, requests: Sequence[tuple[Sequence[int], int]], variant: str = "plain") -> dict[str, float]:
        """Send each pair of prompt ids and answer length, in this order; return tokens and seconds.

        Raises RuntimeError if the process fails, or if an answer has another length.
        """
        data, result = self._folder / "requests.jsonl", self._folder / "result.jsonl"
        data.write_text("".join(json.dumps(_row(ids, length)) + "\n" for ids, length in requests))
        result.unlink(missing_ok=True)
        command = [
            sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang",
            "--host", "127.0.0.1", "--port", str(self._port),
            "--model", str(self._tokenizer), "--tokenizer", str(self._tokenizer),
            "--dataset-name", "openai", "--dataset-path", str(data), "--num-prompts", str(len(requests)),
            "--max-concurrency", str(self._concurrency), "--temperature", "1.0",
            "--warmup-requests", "0", "--ready-check-timeout-sec", "0", "--disable-tqdm",
            "--output-file", str(result), *VARIANTS[variant],
        ]  # fmt: skip
        log = self._folder / "log"
        with log.open("wb") as file:
            ended = subprocess.run(
                command, env=self._environment, stdout=file, stderr=file, timeout=_TIMEOUT, check=False
            )
        if ended.returncode or not result.is_file():
            raise RuntimeError(f"bench_serving failed: {log.read_text(errors='replace')[-3000:]}")
        return _checked(json.loads(result.read_text().splitlines()[-1]), requests)

    def _add_missing_packages(self) -> None:
        """Let its module for the MMMU data set be imported where Hugging Face's ``datasets`` is absent."""
        found = subprocess.run(
            [sys.executable, "-c", "import datasets"], env=self._environment, capture_output=True, check=False
        )
        if found.returncode:
            stand_in = self._folder / "packages"
            stand_in.mkdir(exist_ok=True)
            (stand_in / "datasets.py").write_text("load_dataset = None\n")
            path = [self._environment.get("PYTHONPATH", ""), str(stand_in)]
            self._environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))


def _row(ids: Sequence[int], length: int) -> dict[str, Any]:
    """Return a row of its ``openai`` format. Fields that it does not know go into the request's body.

    ``input_ids`` there take the place of the messages, so that the engine needs no tokenizer.
    """
    return {"messages": [{"role": "user", "content": "-"}], "max_tokens": length, "input_ids": list(ids)}


def _checked(result: dict[str, Any], requests: Sequence[tuple[Sequence[int], int]]) -> dict[str, float]:
    tokens = sum(length for _, length in requests)
    if result["completed"] != len(requests) or result["total_output_tokens"] != tokens:
        raise RuntimeError(
            f"bench_serving completed {result['completed']} of {len(requests)} requests with "
            f"{result['total_output_tokens']} of {tokens} tokens"
        )
    return {"tokens": tokens, "seconds": result["duration"]}


def _write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with a chat template, which it applies to the messages that the ids replace."""
    folder.mkdir(exist_ok=True)
    shutil.copy(TINY_TOKENIZER, folder / "tokenizer.json")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
