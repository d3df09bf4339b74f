"""Prompts from files: read, filtered, tokenised once; equal rows in every run."""

import importlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.exceptions import DatasetGenerationError

from grpo_operator.api.v1alpha1.data import DataSpec
from grpo_operator.api.v1alpha1.status import DataStatus
from grpo_worker.data.files import FileTask, open_files
from grpo_worker.data.tokenizer import TextTokenizer, load_tokenizer
from grpo_worker.model_files.names import TINY_TOKENIZER

Write = Callable[[list[dict[str, Any]]], str]
ROWS = [
    {"prompt": f"What is {i} + 1?", "answer": str(i + 1), "data_source": "sums", "level": i % 3}
    for i in range(10)
]
HELPERS = """
def easy(row):
    return row["level"] == 0

def picky(row):
    return row["levle"] == 0

def backwards(rows, epoch, seed):
    return range(rows - 1, -1, -1)

def forgetful(rows, epoch, seed):
    return [0] * rows
"""
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}{% if enable_thinking is false %}done. {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer("preset:tiny-moe")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    model = tmp_path_factory.mktemp("model")
    (model / "tokenizer.json").write_bytes(TINY_TOKENIZER.read_bytes())
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return load_tokenizer(str(model))


def _write(file: Path, rows: list[dict[str, Any]]) -> str:
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(params=["parquet", "jsonl"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Write:
    return lambda rows: _write(tmp_path / f"rows.{request.param}", rows)


@pytest.fixture
def train(write: Write, tmp_path: Path) -> str:
    (tmp_path / "helpers.py").write_text(HELPERS)
    return write(ROWS)


def _open(train: str, tokenizer: TextTokenizer, cache: Path | None = None, **fields: Any) -> FileTask:
    spec = DataSpec(**({"train": train, "prompt_length": 64} | fields))
    return open_files(spec, tokenizer, 7, cache or Path(train).parent / "cache")


def _counts(task: FileTask) -> DataStatus:
    return DataStatus.model_validate(asdict(task.counts))


def test_every_epoch_shuffles_all_rows(train: str, tokenizer: TextTokenizer) -> None:
    task = _open(train, tokenizer)
    epochs = [[task.record(e * 10 + i).ground_truth for i in range(10)] for e in range(2)]
    assert [sorted(epoch, key=int) for epoch in epochs] == [[str(i + 1) for i in range(10)]] * 2
    assert epochs[0] != epochs[1]
    again = _open(train, tokenizer)
    assert [again.record(i).ground_truth for i in range(10)] == epochs[0]
    record = task.record(3)
    number = int(record.ground_truth) - 1
    assert record.data_source == "sums" and record.extra_info == {"level": number % 3, "index": 3}
    assert record.prompt == f"What is {number} + 1?"
    assert record.columns == {name: ROWS[number][name] for name in ("answer", "data_source", "level")}
    assert task.prompt(3, tokenizer) == tokenizer.encode(record.prompt)


def test_the_order_of_a_seed_never_changes(train: str, tokenizer: TextTokenizer) -> None:
    """Checkpoints contain only indices: another order would train on other rows after an upgrade."""
    task = _open(train, tokenizer)
    assert " ".join(task.record(i).ground_truth for i in range(10)) == "4 10 2 9 3 8 5 6 7 1"


def test_filters_and_curricula_are_plain_functions(train: str, tokenizer: TextTokenizer) -> None:
    helpers = Path(train).parent / "helpers.py"
    task = _open(train, tokenizer, filter=f"{helpers}:easy", order=f"{helpers}:backwards")
    assert [task.record(i).ground_truth for i in range(5)] == ["10", "7", "4", "1", "10"]
    assert _counts(task) == DataStatus(rows=4, filtered=6)
    assert f"6 of 10 rows are left out: spec.data.filter={helpers}:easy" in task.notes[0]
    with pytest.raises(ValueError, match="epoch 0 must hold each of the 10 rows once"):
        _open(train, tokenizer, order=f"{helpers}:forgetful").prompt(0, tokenizer)
    with pytest.raises(ValueError, match=r"spec\.data\.filter=.*:nothing: .*has no attribute 'nothing'"):
        _open(train, tokenizer, filter=f"{helpers}:nothing")
    with pytest.raises(ValueError, match=r"spec\.data\.filter=.*:picky: row 0: KeyError\('levle'\)"):
        _open(train, tokenizer, filter=f"{helpers}:picky")


def test_a_second_start_tokenises_nothing(
    train: str, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _open(train, tokenizer)

    def refuse(*_: Any) -> list[int]:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(TextTokenizer, "encode", refuse)
    again = _open(train, tokenizer)
    assert [again.prompt(i, tokenizer) for i in range(10)] == [first.prompt(i, tokenizer) for i in range(10)]
    assert again.counts == first.counts and again.notes == first.notes


def test_the_cache_key_covers_everything_that_changes_ids(
    train: str, tokenizer: TextTokenizer, chatty: TextTokenizer
) -> None:
    question = _open(train, tokenizer).record(0).prompt
    quick = {"chat_template_kwargs": {"enable_thinking": "false"}}
    cases: list[tuple[TextTokenizer, dict[str, Any], str]] = [
        (tokenizer, {}, question),
        (chatty, {}, f"user: {question}\nassistant: "),
        (chatty, {"raw": True}, question),
        (chatty, quick, f"user: {question}\nassistant: done. "),
        (tokenizer, {"prompt_key": "data_source"}, "sums"),
    ]
    for model, fields, wanted in cases:
        assert _open(train, model, **fields).prompt(0, model) == tokenizer.encode(wanted), fields


def test_a_changed_filter_is_applied_again(train: str, tokenizer: TextTokenizer) -> None:
    helpers = Path(train).parent / "helpers.py"
    assert _open(train, tokenizer, filter=f"{helpers}:easy").counts.rows == 4
    helpers.write_text(HELPERS.replace('["level"] == 0', '["level"] == 1'))
    assert _open(train, tokenizer, filter=f"{helpers}:easy").counts.rows == 3


def test_a_changed_filter_in_a_module_is_applied_again(
    train: str, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(train).parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for level, rows in ((0, 4), (1, 3)):
        rule = f"def keep(row):\n    return row['level'] == {level}\n"
        (Path(train).parent / "rules_of_rows.py").write_text(rule)
        sys.modules.pop("rules_of_rows", None)
        importlib.invalidate_caches()
        assert _open(train, tokenizer, filter="rules_of_rows:keep").counts.rows == rows


def test_long_prompts_are_left_out_and_counted(train: str, tokenizer: TextTokenizer) -> None:
    lengths = sorted(len(tokenizer.encode(str(row["prompt"]))) for row in ROWS)
    rows = [*ROWS, dict(ROWS[0], prompt="What is it? " * 9)]
    task = _open(_write(Path(train), rows), tokenizer, prompt_length=lengths[-1])
    assert _counts(task) == DataStatus(rows=10, too_long=1)
    limit = f"spec.data.promptLength={lengths[-1]}"
    assert task.notes[0] == f"1 of 11 rows is left out: the prompt exceeds {limit}"
    wanted = f"no row is left: 11 of 11 rows .*promptLength=8; the shortest prompt has {lengths[0]} tokens"
    with pytest.raises(ValueError, match=wanted):
        _open(train, tokenizer, prompt_length=8)


def test_rows_without_a_prompt_are_left_out_and_counted(write: Write, chatty: TextTokenizer) -> None:
    good = [{"role": "user", "content": "hi"}]
    prompts = [good, None, [], [*good, {"role": "user", "content": None}], good]
    task = _open(write([{"prompt": prompt, "answer": "x"} for prompt in prompts]), chatty)
    assert _counts(task) == DataStatus(rows=2, empty=3)
    wanted = "3 of 5 rows are left out: there is no usable prompt; the first is row 1: there is no prompt"
    assert task.notes == [wanted]
    assert [task.record(i).prompt for i in range(2)] == [good] * 2


def test_a_broken_row_may_be_first_or_last(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """The first batch of rows must not determine the type of the columns."""
    rows = [{"prompt": "hi" if i else None, "answer": "x"} for i in range(2500)]
    task = _open(_write(tmp_path / "first.jsonl", rows), tokenizer)
    assert _counts(task) == DataStatus(rows=2499, empty=1) and "1 of 2 500 rows is" in task.notes[0]
    task = _open(_write(tmp_path / "late.jsonl", rows[::-1]), tokenizer)
    assert _counts(task) == DataStatus(rows=2499, empty=1) and "row 2499" in task.notes[0]


def test_a_column_of_neither_text_nor_messages_names_the_row(
    train: str, tmp_path: Path, tokenizer: TextTokenizer, chatty: TextTokenizer
) -> None:
    with pytest.raises(ValueError, match=r"promptKey='level': row 0: '0' is neither text nor messages: name"):
        _open(train, tokenizer, prompt_key="level")
    share = [{"prompt": [{"from": "human", "value": "hi"}], "answer": "x"}] * 2
    with pytest.raises(ValueError, match=r"no row is left: 2 of 2 .* row 0: message 0 has no role"):
        _open(_write(tmp_path / "share.jsonl", share), chatty)


def test_text_without_a_chat_template_is_noted(train: str, tmp_path: Path, tokenizer: TextTokenizer) -> None:
    note = "the model has no chat template: text prompts are used unchanged"
    assert _open(train, tokenizer).notes == [note]
    assert _open(train, tokenizer, raw=True).notes == []
    messages = [{"prompt": [{"role": "user", "content": "Hi"}], "answer": "x"}]
    with pytest.raises(ValueError, match="no chat template: give prompts as text"):
        _open(_write(tmp_path / "messages.jsonl", messages), tokenizer)


def test_missing_files_and_columns_are_named(train: str, tokenizer: TextTokenizer) -> None:
    folder = Path(train).parent
    for lost in ("/nowhere/x.jsonl", str(folder / "lost-*.parquet"), str(folder / "lost-*.jsonl")):
        wanted = f"spec.data.train={lost}: no such file: correct the path, or mount its volume"
        with pytest.raises(ValueError, match=re.escape(wanted)):
            _open(lost, tokenizer, cache=folder / "cache")
    wanted = (
        r"spec\.data\.promptKey='question': the files have no such column, but prompt, answer, data_source, "
        "level: set it to one of them"
    )
    with pytest.raises(ValueError, match=wanted):
        _open(train, tokenizer, prompt_key="question")


def test_empty_files_are_named(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    empty, parquet, blank = (tmp_path / name for name in ("empty.jsonl", "none.parquet", "blank.jsonl"))
    empty.touch()
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), parquet)
    for name in ("empty.jsonl", "empty*.jsonl", "none.parquet"):
        with pytest.raises(ValueError, match=rf"{tmp_path}/[a-z.]+ is empty: remove it, or name other files"):
            _open(str(tmp_path / name), tokenizer)
    blank.write_text("\n")
    with pytest.raises(ValueError, match=rf"spec\.data\.train={blank}: "):
        _open(str(blank), tokenizer)


def test_an_empty_file_among_others_is_noted(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    (tmp_path / "part-0.jsonl").touch()
    _write(tmp_path / "part-1.jsonl", ROWS)
    task = _open(str(tmp_path / "part-*.jsonl"), tokenizer)
    assert task.counts.rows == 10
    assert task.notes[-1] == f"1 of 2 files is empty; the first is {tmp_path}/part-0.jsonl"


@pytest.mark.parametrize(("name", "text"), [("x.jsonl", '{"prompt": "a"}\n{"prompt"'), ("x.parquet", "none")])
def test_a_broken_file_is_named(name: str, text: str, tmp_path: Path, tokenizer: TextTokenizer) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(
        ValueError, match=rf"spec\.data\.train={tmp_path / name}: .*([Ee]rror|not valid Parquet)"
    ):
        _open(str(tmp_path / name), tokenizer)


def test_a_storage_failure_is_not_a_data_error(
    train: str, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ValueError fails the job; this error may be transient and is retried."""

    def fail(*_: Any, **__: Any) -> None:
        raise DatasetGenerationError("while reading") from OSError(5, "Input/output error")

    monkeypatch.setattr("grpo_worker.data.files.load_dataset", fail)
    with pytest.raises(DatasetGenerationError):
        _open(train, tokenizer)


def test_files_are_read_from_an_object_store(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    with fsspec.open("memory://bucket/rows.jsonl", "w") as file:
        file.write("".join(json.dumps(row) + "\n" for row in ROWS))
    assert _open("memory://bucket/rows.jsonl", tokenizer, cache=tmp_path).counts.rows == 10
    with pytest.raises(ValueError, match=r"spec\.data\.train=memory://bucket/lost\.jsonl: no such file"):
        _open("memory://bucket/lost.jsonl", tokenizer, cache=tmp_path)
