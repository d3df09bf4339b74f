"""Files of a job whose prompts are worth nothing in some steps, and whose other scores go up and down."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

HELD_OUT = "held-out"  # name of the validation set, which has no worthless prompt
ROWS = 128  # to train on, in this order
LOWEST = 0.5  # score of an answer to a prompt that is worth something
_HELD_OUT_ROWS = 16
_FOLDER = "/data"  # in the pods
_REWARD = f'''
"""Scores of answers by chance, but always the same: nobody learns them."""

import zlib


def in_order(rows, epoch, seed):
    return range(rows)


def compute_score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "worthless":
        return 0.0
    return {LOWEST} + zlib.crc32(f"{{ground_truth}} {{solution_str}}".encode()) % 100 / 200
'''


def write(folder: Path, worthless: Collection[int]) -> None:
    """Write the files to ``folder``. ``worthless``: rows without any score."""
    rows = [_row(number, "worthless" if number in worthless else f"row {number}") for number in range(ROWS)]
    held_out = [_row(ROWS + number, f"{HELD_OUT} {number}") for number in range(_HELD_OUT_ROWS)]
    for name, content in (("train", rows), (HELD_OUT, held_out)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in content))
    (folder / "reward.py").write_text(_REWARD)


def _row(number: int, answer: str) -> dict[str, str]:
    return {"prompt": f"What is {number} + {number * 7 % 31}?", "answer": answer}


def data_and_reward(folder: Path, prompts: int) -> dict[str, Any]:
    """Return these fields of the job on the files in ``folder``. ``prompts``: of a step."""
    return {
        "data": {
            "train": f"{_FOLDER}/train.jsonl",
            "volume": {"path": str(folder), "mountPath": _FOLDER},
            "order": f"{_FOLDER}/reward.py:in_order",
            "promptLength": 64,
            "responseLength": 4,
            "trainBatchSize": prompts,
        },
        "reward": {"function": f"{_FOLDER}/reward.py:compute_score", "onFailure": "stop"},
    }


def held_out(**validation: Any) -> dict[str, Any]:
    """Return the field ``validation`` of such a job, which keeps the best checkpoint."""
    one = {"name": HELD_OUT, "data": f"{_FOLDER}/{HELD_OUT}.jsonl"}
    sampling = {"temperature": 1.0, "samplesPerPrompt": 2}
    return {"validation": {"sets": [one], "keepBest": HELD_OUT} | sampling | validation}
