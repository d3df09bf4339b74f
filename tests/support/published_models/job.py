"""A job on a user's own files: a published model's directory, verl's data, a reward function."""

import copy
import shutil
from pathlib import Path
from typing import Any

import yaml

from support.published_models import directory as published

REPO = Path(__file__).parents[3]
DATA = REPO / "tests" / "data"
REWARD = '''
"""Rewards short answers, so that random weights already get some."""

def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert data_source == "openai/gsm8k" and extra_info["split"] == "train", (data_source, extra_info)
    assert ground_truth.replace(".", "").lstrip("-").isdigit(), ground_truth
    return {"score": 1.0 / (1 + len(solution_str)), "length": len(solution_str)}
'''


def write_files(root: Path, model: str, generation: str) -> None:
    """Write ``models/MODEL`` and ``datasets`` below ``root``."""
    folder = root / "models" / model
    shutil.rmtree(folder, ignore_errors=True)
    published.write(model, generation, folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors are written for their owner alone, and pods run as another user
    (root / "datasets").mkdir(exist_ok=True)
    for name in ("gsm8k.parquet", "gsm8k.jsonl", "math.parquet", "math.jsonl"):
        shutil.copy(DATA / name, root / "datasets" / name)
    (root / "datasets" / "reward.py").write_text(REWARD)


def job_spec(root: Path, model: str, layout: dict[str, int], **changes: Any) -> dict[str, Any]:
    """The demo's job on those files: three steps on two ranks and one engine, then an export."""
    spec = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())["spec"]
    engine = {"device": "cpu", "dtype": "float32", "contextLength": 512, "maxTotalTokens": 16384}
    rollout = copy.deepcopy(spec["rollout"])
    rollout["template"] |= {"replicas": 1, "engine": engine}
    return dict(
        spec
        | {
            "model": {
                "path": f"/models/{model}",
                "volume": {"path": str(root / "models"), "mountPath": "/models"},
            },
            "data": {
                "train": "/data/gsm8k.parquet",
                "volume": {"path": str(root / "datasets"), "mountPath": "/data"},
                "answerKey": "reward_model.ground_truth",
                "promptLength": 400,
                "responseLength": 12,
                "trainBatchSize": 4,
            },
            "reward": {"function": "/data/reward.py:compute_score"},
            "algorithm": spec["algorithm"] | {"samplesPerPrompt": 4},
            "trainer": spec["trainer"]
            | {"parallelism": layout, "miniBatchSize": 4, "microBatchSizePerGpu": 4},
            "rollout": rollout,
            "checkpoint": spec["checkpoint"] | {"exportAtEnd": True, "everySteps": 100},
            "totalSteps": 3,
        }
        | changes
    )
