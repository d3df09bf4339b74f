"""Prompt formatting, records of files in verl's layout, and gym tasks with prompts that are too long."""

import json
import runpy
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_operator.api.v1alpha1.data import DataSpec
from grpo_worker.data.files import FileTask, lookup, open_files
from grpo_worker.data.prompts import PromptSource
from grpo_worker.data.tasks import (
    Counts,
    PromptFormat,
    UnusablePromptError,
    jsonable,
    open_gym,
    read_prompt,
)
from grpo_worker.data.tokenizer import TextTokenizer, load_tokenizer
from grpo_worker.model_files.names import TINY_TOKENIZER

GYM = "reasoning-gym:gcd?max_numbers=8"
VERL = Path(__file__).parents[3] / "data"
TRUTH = "reward_model.ground_truth"
TRUTHS = [("gsm8k", "-5 1260 19 7.50"), ("math", r"10 7 \frac{3}{4} \sqrt{3}")]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}{% if enable_thinking is false %}done. {% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


def _with_template(template: str, model: Path) -> TextTokenizer:
    (model / "tokenizer.json").write_bytes(TINY_TOKENIZER.read_bytes())
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return load_tokenizer(str(model))


@pytest.fixture(scope="module")
def plain() -> TextTokenizer:
    return load_tokenizer("preset:tiny-moe")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return _with_template(TEMPLATE, tmp_path_factory.mktemp("model"))


def _format(tokenizer: TextTokenizer, **fields: Any) -> PromptFormat:
    return PromptFormat.of(DataSpec(**({"train": GYM} | fields)), tokenizer)


def test_text_uses_the_chat_template_unless_raw(plain: TextTokenizer, chatty: TextTokenizer) -> None:
    as_message = _format(chatty)
    assert as_message.encode("hi", chatty) == plain.encode("user: hi\nassistant: ")
    assert as_message.encode(HI, chatty) == as_message.encode("hi", chatty)
    raw = _format(chatty, raw=True)
    assert raw.encode("hi", chatty) == plain.encode("hi")
    assert raw.encode(HI, chatty) == as_message.encode(HI, chatty), "messages always need the template"
    assert as_message.note == raw.note == ""


def test_without_a_template_text_is_raw_and_messages_are_refused(plain: TextTokenizer) -> None:
    assert _format(plain).encode("hi", plain) == plain.encode("hi")
    assert "no chat template" in _format(plain).note and not _format(plain, raw=True).note
    with pytest.raises(ValueError, match="no chat template: give prompts as text"):
        _format(plain).encode(HI, plain)


def test_variables_reach_the_template_as_json(plain: TextTokenizer, chatty: TextTokenizer) -> None:
    quick = _format(chatty, chat_template_kwargs={"enable_thinking": "false"})
    for prompt in ("hi", HI):
        assert quick.encode(prompt, chatty) == plain.encode("user: hi\nassistant: done. ")


def test_messages_lose_only_null_fields() -> None:
    assert read_prompt("hi") == "hi"
    assert read_prompt(np.array([{"role": "user", "content": "hi", "name": None}])) == HI
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert read_prompt(parts) == parts
    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert read_prompt([*HI, call]) == [*HI, {"role": "assistant", "tool_calls": [{"id": "1"}]}]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "no prompt"),
        (" \n", "no prompt"),
        ([], "no prompt"),
        ([*HI, {"role": "user", "content": None}], "message 1 has no role or no content"),
        ([{"from": "human", "value": "hi"}], "message 0 has no role or no content"),
    ],
)
def test_a_broken_prompt_differs_from_a_wrong_column(value: Any, reason: str) -> None:
    with pytest.raises(UnusablePromptError, match=reason):
        read_prompt(value)


@pytest.mark.parametrize("value", [3, True, {"role": "user"}, ["hi"]])
def test_a_wrong_column_holds_neither_text_nor_messages(value: Any) -> None:
    with pytest.raises(TypeError, match="neither text nor messages"):
        read_prompt(value)


def test_whatever_parquet_holds_becomes_json() -> None:
    value = {
        "array": np.array([[1, 2]], dtype=np.int16),
        "scalar": np.float32(0.5),
        "when": [datetime(2024, 5, 6, 7, tzinfo=UTC), date(2024, 5, 6), timedelta(minutes=2)],
        "bytes": (b"text", b"\xff"),
        "numbers": [float("nan"), 1.5, True, None, Decimal("0.10")],
    }
    wanted = {
        "array": [[1, 2]],
        "scalar": 0.5,
        "when": ["2024-05-06T07:00:00+00:00", "2024-05-06", 120.0],
        "bytes": ["text", "/w=="],
        "numbers": [None, 1.5, True, None, "0.10"],
    }
    assert jsonable(value) == wanted
    assert json.loads(json.dumps(jsonable(value), allow_nan=False)) == wanted


def _open(file: Path, tokenizer: TextTokenizer, cache: Path, **fields: Any) -> FileTask:
    spec = DataSpec(**({"train": str(file), "prompt_length": 512} | fields))
    return open_files(spec, tokenizer, 7, cache)


def _parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(("name", "truths"), TRUTHS)
def test_files_in_verls_layout_train_unchanged(
    name: str, truths: str, kind: str, chatty: TextTokenizer, tmp_path: Path
) -> None:
    task = _open(VERL / f"{name}.{kind}", chatty, tmp_path, answer_key=TRUTH)
    assert task.counts == Counts(rows=4) and task.notes == []
    assert sorted(task.record(i).ground_truth for i in range(4)) == truths.split()
    rows = [json.loads(line) for line in (VERL / f"{name}.jsonl").read_text().splitlines()]
    for index in range(4):
        record = task.record(index)
        row = rows[record.extra_info["index"]]
        assert record.data_source == row["data_source"]
        assert record.ground_truth == row["reward_model"]["ground_truth"]
        beside = {"ability": "math"} | {key: row[key] for key in ("level", "type") if key in row}
        assert record.extra_info == beside | row["extra_info"]
        assert record.prompt == row["prompt"]
        assert record.columns == {key: value for key, value in row.items() if key != "prompt"}
        question = row["prompt"][0]["content"]
        assert task.prompt(index, chatty) == chatty.encode(f"user: {question}\nassistant: ")
        json.dumps(asdict(record), allow_nan=False)


def test_the_committed_files_equal_the_scripts_output(
    tmp_path: Path,
) -> None:
    runpy.run_path(str(VERL / "build.py"))["build"](tmp_path)
    for name in ("gsm8k", "math"):
        assert pq.read_table(VERL / f"{name}.parquet").equals(pq.read_table(tmp_path / f"{name}.parquet"))
        assert (VERL / f"{name}.jsonl").read_text() == (tmp_path / f"{name}.jsonl").read_text()


def test_a_missing_answer_key_error_suggests_verls(chatty: TextTokenizer, tmp_path: Path) -> None:
    wanted = (
        r"spec\.data\.answerKey='answer': the files have no such column, but data_source, prompt, ability, "
        r"reward_model\.ground_truth, reward_model\.style, extra_info\.answer, .*extra_info\.split: "
        r"for verl's layout set it to reward_model\.ground_truth"
    )
    with pytest.raises(ValueError, match=wanted):
        _open(VERL / "gsm8k.parquet", chatty, tmp_path)
    with pytest.raises(ValueError, match=r"answerKey='reward_model\.truth': .* set it to reward_model"):
        _open(VERL / "gsm8k.parquet", chatty, tmp_path, answer_key="reward_model.truth")


def test_dotted_keys_enter_structs_unless_a_column_has_the_name(plain: TextTokenizer, tmp_path: Path) -> None:
    kept = json.dumps({"answer": {"final": 3}, "index": 41})
    row = {"prompt": "hi", "a.b": "dotted", "a": {"b": "nested", "c": "inner"}, "extra_info": kept}
    file = _parquet(tmp_path, [row])
    keys = ("a.b", "a.c", "extra_info.answer.final")
    dotted, inner, final = (_open(file, plain, tmp_path, answer_key=key).record(0) for key in keys)
    assert (dotted.ground_truth, inner.ground_truth, final.ground_truth) == ("dotted", "inner", 3)
    assert inner.extra_info == {"a.b": "dotted", "answer": {"final": 3}, "index": 41}
    assert dotted.extra_info["a"] == row["a"] and dotted.data_source == str(file)
    assert lookup({"a": None}, "a.b") is None and lookup({"a": "no json"}, "a.b") is None
    with pytest.raises(ValueError, match=r"but prompt, a\.b, a\.c, extra_info\.answer, extra_info\.index:"):
        _open(file, plain, tmp_path, answer_key="extra_info.final")


def test_the_schema_includes_columns_missing_from_the_first_rows(
    plain: TextTokenizer, tmp_path: Path
) -> None:
    late: list[Any] = [None] * 150 + [{"ground_truth": "150"}]
    file = _parquet(tmp_path, [{"prompt": "hi", "reward_model": judged} for judged in late])
    task = _open(file, plain, tmp_path, answer_key=TRUTH)
    assert {task.record(i).ground_truth for i in range(151)} == {None, "150"}


def test_records_of_parquet_reach_reward_servers_as_json(plain: TextTokenizer, tmp_path: Path) -> None:
    row = {"prompt": "hi", "answer": b"\xff\xfe", "when": datetime(2024, 5, 6), "score": float("nan")}
    record = _open(_parquet(tmp_path, [row]), plain, tmp_path).record(0)
    assert record.ground_truth == "//4="
    assert record.extra_info == {"when": "2024-05-06T00:00:00", "score": None, "index": 0}


def test_json_lines_may_have_different_columns(chatty: TextTokenizer, tmp_path: Path) -> None:
    rows = [
        {"prompt": "hi", "answer": 3, "extra_info": {"a": 1}},
        {"prompt": HI, "answer": "x", "extra_info": {"b": [2], "index": 9}},
    ]
    file = tmp_path / "mixed.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = _open(file, chatty, tmp_path)
    assert task.prompt(0, chatty) == task.prompt(1, chatty) == chatty.encode("user: hi\nassistant: ")
    found = {task.record(i).ground_truth: task.record(i).extra_info for i in range(2)}
    assert found[3]["a"] == 1 and found["x"] == {"b": [2], "index": 9}


def test_a_gym_question_is_one_message_or_one_line(plain: TextTokenizer, chatty: TextTokenizer) -> None:
    line = open_gym(GYM, 3)
    record = line.record(5)
    assert record.columns == {"answer": record.ground_truth} and record.extra_info == {"index": 5}
    assert line.prompt(5, plain) == plain.encode(f"{record.prompt}\n")
    assert open_gym(GYM, 3, _format(chatty, raw=True)).prompt(5, chatty) == line.prompt(5, plain)
    message = open_gym(GYM, 3, _format(chatty))
    assert message.prompt(5, chatty) == plain.encode(f"user: {record.prompt}\nassistant: ")
    assert message.notes == [] and "no chat template" in open_gym(GYM, 3, _format(plain)).notes[0]


def test_an_error_of_a_chat_template_is_named(tmp_path: Path) -> None:
    strict = _with_template("{{ raise_exception('no users') }}", tmp_path)
    with pytest.raises(ValueError, match=r"chat template refuses these messages: .*no users"):
        open_gym(GYM, 3, _format(strict)).prompt(0, strict)


def _some_length(tokenizer: TextTokenizer) -> int:
    task = open_gym(GYM, 3)
    return sorted(len(task.prompt(index, tokenizer)) for index in range(60))[20]


def test_prompts_that_are_too_long_are_skipped_and_counted(plain: TextTokenizer) -> None:
    task, limit = open_gym(GYM, 3), _some_length(plain)
    fits = [index for index in range(60) if len(task.prompt(index, plain)) <= limit]
    prompts = PromptSource(task, plain, limit)
    assert [p.index for p in prompts.take(4)] == fits[:4]
    assert [p.index for p in prompts.take(12)] == fits[:12], "what is in flight comes again, and no other"
    assert prompts.too_long == fits[11] + 1 - 12 > 0
    prompts.consumed(prompts.take(12))
    assert [p.index for p in prompts.take(4)] == fits[12:16], "each index comes once"


def test_a_restart_skips_the_same_items(plain: TextTokenizer) -> None:
    limit = _some_length(plain)
    first, again = (PromptSource(open_gym(GYM, 3), plain, limit) for _ in range(2))
    first.consumed(first.take(4)[:2])
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert again.take(12) == first.take(12)
    assert again.too_long == first.too_long > 0 and again.state_dict() == first.state_dict()


def test_checkpoints_of_older_versions_have_no_count(plain: TextTokenizer) -> None:
    prompts = PromptSource(open_gym(GYM, 3), plain, 4096)
    prompts.load_state_dict({"cursor": 7, "in_flight": [2, 5]})
    assert [p.index for p in prompts.take(4)] == [2, 5, 7, 8] and prompts.too_long == 0


def test_when_no_prompt_fits_the_field_is_named(
    plain: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_worker.data.prompts.TRIES", 20)
    prompts = PromptSource(open_gym(GYM, 3), plain, 8)
    before = prompts.state_dict()
    message = r"promptLength=8: none of 20 consecutive prompts .* has \d\d tokens"
    with pytest.raises(ValueError, match=message):
        prompts.take(1)
    assert prompts.state_dict() == before
