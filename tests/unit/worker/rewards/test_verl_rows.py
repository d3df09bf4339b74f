"""Rows in verl's layout, from a Parquet file to the reward of an answer."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_operator.api.v1alpha1.data import DataSpec, RewardSpec
from grpo_worker.data.files import open_files
from grpo_worker.data.tokenizer import TextTokenizer, load_tokenizer
from grpo_worker.model_files.names import TINY_TOKENIZER
from grpo_worker.rewards.verifiers import FunctionVerifier, Item

DAPO = "The last line of your response should be of the form Answer: $Answer. What is 6 times 7?"


def _row(source: str, question: str, truth: str) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": 0},
    }


def _with_chat_template(model: Path) -> TextTokenizer:
    (model / "tokenizer.json").write_bytes(TINY_TOKENIZER.read_bytes())
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    return load_tokenizer(str(model))


@pytest.mark.parametrize(
    ("row", "right", "wrong"),
    [
        (_row("openai/gsm8k", "What is 6 times 7?", "42"), "6 * 7 = 42\n#### 42", "#### 41"),
        (
            _row("lighteval/MATH", "Half of one?", "\\frac{1}{2}"),
            "It is $\\boxed{0.5}$.",
            "It is $\\boxed{2}$.",
        ),
        (_row("math_dapo", DAPO, "42"), "6 times 7 is 42.\nAnswer: 42", "6 times 7 is 41.\nAnswer: 41"),
    ],
)
def test_a_row_of_verl_gives_the_reward_of_its_answer(
    row: dict[str, Any], right: str, wrong: str, tmp_path: Path
) -> None:
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([row]), file)
    tokenizer = _with_chat_template(tmp_path)
    spec = DataSpec(train=str(file), answer_key="reward_model.ground_truth")
    record = open_files(spec, tokenizer, 0, tmp_path).record(0)
    judge = FunctionVerifier(RewardSpec(builtin="math", workers=1, timeout_seconds=20, on_failure="stop"))
    assert judge.score([Item(0, right, record), Item(1, wrong, record)]) == [1.0, 0.0]
