"""Prompts from files: read, filtered, tokenised once; the same rows in every run."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_operator.api.data import DataSpec
from grpo_worker.data import files
from grpo_worker.data.files import FileTask, open_files
from grpo_worker.data.tokenizer import TextTokenizer, load_tokenizer

ROWS = [
    {"prompt": f"What is {i} + 1?", "answer": str(i + 1), "data_source": "sums", "level": i % 3}
    for i in range(10)
]
HELPERS = """
def easy(row):
    return row["level"] == 0

def backwards(rows, epoch, seed):
    return range(rows - 1, -1, -1)

def forgetful(rows, epoch, seed):
    return [0] * rows
"""


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer("preset:tiny-moe", 2, 0)


@pytest.fixture(params=["parquet", "jsonl"])
def train(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    file = tmp_path / f"rows.{request.param}"
    if request.param == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "helpers.py").write_text(HELPERS)
    return str(file)


def _open(train: str, tokenizer: TextTokenizer, **fields: Any) -> FileTask:
    spec = DataSpec(**({"train": train, "prompt_length": 64} | fields))
    return open_files(spec, tokenizer, 7, Path(train).parent / "cache")


def test_every_row_comes_once_an_epoch_in_an_order_of_its_own(train: str, tokenizer: TextTokenizer) -> None:
    task = _open(train, tokenizer)
    epochs = [[task.record(e * 10 + i).ground_truth for i in range(10)] for e in range(2)]
    assert [sorted(epoch, key=int) for epoch in epochs] == [[str(i + 1) for i in range(10)]] * 2
    assert epochs[0] != epochs[1]
    again = _open(train, tokenizer)
    assert [again.record(i).ground_truth for i in range(10)] == epochs[0]
    record = task.record(3)
    assert record.data_source == "sums" and record.extra_info == {"level": (int(record.ground_truth) - 1) % 3,
                                                                  "index": 3}  # fmt: skip
    question = f"What is {int(record.ground_truth) - 1} + 1?"
    assert task.prompt(3, tokenizer) == tokenizer.encode(question)


def test_filters_and_curricula_are_plain_functions(train: str, tokenizer: TextTokenizer) -> None:
    helpers = Path(train).parent / "helpers.py"
    task = _open(train, tokenizer, filter=f"{helpers}:easy", order=f"{helpers}:backwards")
    assert [task.record(i).ground_truth for i in range(5)] == ["10", "7", "4", "1", "10"]
    with pytest.raises(ValueError, match="epoch 0 must hold each of the 10 rows once"):
        _open(train, tokenizer, order=f"{helpers}:forgetful").prompt(0, tokenizer)
    with pytest.raises(ValueError, match=r"spec\.data\.filter=.*:nothing: .*has no attribute 'nothing'"):
        _open(train, tokenizer, filter=f"{helpers}:nothing")


def test_a_second_start_tokenises_nothing(
    train: str, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _open(train, tokenizer)

    def refuse(*_: Any) -> list[int]:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(TextTokenizer, "encode", refuse)
    again = _open(train, tokenizer)
    assert [again.prompt(i, tokenizer) for i in range(10)] == [first.prompt(i, tokenizer) for i in range(10)]


def test_long_prompts_are_left_out(train: str, tokenizer: TextTokenizer) -> None:
    lengths = [len(tokenizer.encode(str(row["prompt"]))) for row in ROWS]
    short = _open(train, tokenizer, prompt_length=max(8, min(lengths)))
    wanted = sum(length <= max(8, min(lengths)) for length in lengths)
    assert len({short.record(i).ground_truth for i in range(wanted)}) == wanted
    with pytest.raises(ValueError, match="none of 10 rows has a prompt of at most promptLength=8 tokens"):
        if min(lengths) <= 8:
            pytest.skip("the tokenizer is too good")
        _open(train, tokenizer, prompt_length=8)


def test_missing_files_and_columns_are_named(train: str, tokenizer: TextTokenizer) -> None:
    with pytest.raises(ValueError, match=r"spec\.data\.train=/nowhere/x\.jsonl"):
        _open("/nowhere/x.jsonl", tokenizer)
    with pytest.raises(
        ValueError, match=r"no column 'question', but prompt, .*: set promptKey and answerKey"
    ):
        _open(train, tokenizer, prompt_key="question")


def test_chat_prompts_need_a_chat_template(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": "Hi"}], "answer": "x"}) + "\n")
    with pytest.raises(ValueError, match="chat template: give prompts as text"):
        _open(str(file), tokenizer)
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_bytes(files.Path(str(tokenizer._file)).read_bytes())
    (model / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
                "{% if add_generation_prompt %}assistant: {% endif %}",
            }
        )
    )
    chatty = load_tokenizer(str(model), 2, 0)
    task = _open(str(file), chatty)
    assert task.prompt(0, chatty) == chatty.encode("user: Hi\nassistant: ")
