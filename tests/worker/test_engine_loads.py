"""SGLang's models load every tensor of every family by copies, which a direct transfer replays."""

import json
import os
import subprocess
import sys

import pytest

from grpo_devcluster.cpu_engine import environment
from grpo_worker.megatron.families.registry import family_of
from support.tiny_models import tiny_model

MODELS = (
    "deepseek_v3", "glm4_moe", "glm4_moe-no-norms", "kimi_k2", "llama", "llama-tied", "qwen2", "qwen3",
)  # fmt: skip


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.ranks.load_cases"],
        env=environment(tmp_path_factory.mktemp("loads")) | {"PYTHONPATH": os.pathsep.join(sys.path)},
        input=json.dumps(MODELS),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_load_of_every_tensor_is_a_copy(name: str, loads: dict[str, dict[str, list[str]]]) -> None:
    hf = tiny_model(name)
    assert loads[name]["unexplained"] == loads[name]["ignored"] == []
    assert loads[name]["copied"] == sorted(family_of(hf).shapes(hf))
