"""The samples of validations in their Parquet files."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pandas
import pytest

from grpo_operator.api.v1alpha1.observability import SamplesSpec
from grpo_worker.checkpointing.attempts import SupersededError
from grpo_worker.common.reward_parts import Reward
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller import show_samples
from grpo_worker.data.prompts import Prompt
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.rollout.sampling import Sample
from grpo_worker.samples import validation_writer
from grpo_worker.samples.files import sample_steps
from grpo_worker.samples.reader import samples
from grpo_worker.samples.table import SCHEMA, Decode
from grpo_worker.samples.validation_table import ValidatedGroup
from grpo_worker.samples.validation_writer import ValidationSampleWriter

TOKENIZER = load_tokenizer("preset:tiny-moe")
FIRST = {"aime": 2**40, "math": 2**41}
FILES = "validation_samples"


def group(of: str, place: int, *, answers: int = 2, text: str = "gcd", refused: str = "") -> ValidatedGroup:
    prompt = Prompt(FIRST[of] + place, tuple(TOKENIZER.encode(f"{text} {place} of {of}")))
    if refused:
        return ValidatedGroup(of, FIRST[of], prompt, refused=refused)
    drawn = [_sample(prompt.index, f"answer {place} {number}", number) for number in range(answers)]
    return ValidatedGroup(of, FIRST[of], prompt, drawn, [place + number / 2 for number in range(answers)])


def _sample(prompt: int, text: str, number: int) -> Sample:
    ids = TOKENIZER.encode(text)
    return Sample(prompt, number, ids, [-0.5] * len(ids), 40, f"engine-{number}")


def writer(
    folder: Path, spec: SamplesSpec | None = None, check: Callable[[], None] = lambda: None,
    decode: Decode = TOKENIZER.decode_all,
) -> ValidationSampleWriter:  # fmt: skip
    return ValidationSampleWriter(JobFolder(folder, folder), spec or SamplesSpec(), decode, check)


def write(
    writing: ValidationSampleWriter, version: int, groups: Sequence[ValidatedGroup], attempt: int = 4
) -> float:
    """Write a validation whose prompts are asked in the order of their sets; return the files missing."""
    writing.begin(version, attempt)
    for one in sorted(groups, key=lambda one: one.prompt.index):
        writing.asked(one.set, one.prompt.index)
    for one in groups:
        writing.add(one)
    writing.end(complete=True)
    writing.flush()
    return writing.metrics()["samples/missing_validations"]


def test_a_file_has_every_sample_with_its_set_text_tokens_and_score(tmp_path: Path) -> None:
    groups = [group("aime", 1), group("aime", 0), group("aime", 2, refused="too long"), group("math", 0)]
    assert write(writer(tmp_path), 40, groups) == 0
    frame = pandas.read_parquet(tmp_path / FILES / "00000040.parquet")
    assert list(frame.columns) == ["step", "set", *SCHEMA.names[1:]]
    rows = list(samples(tmp_path, 40, validation=True))
    assert [(row["set"], row["prompt_index"], row["uid"]) for row in rows] == [
        ("aime", 0, "0.0"), ("aime", 0, "0.1"), ("aime", 1, "1.0"), ("aime", 1, "1.1"), ("aime", 2, None),
        ("math", 0, "0.0"), ("math", 0, "0.1"),
    ]  # fmt: skip
    assert rows[4]["dropped"] == "too long" and rows[4]["prompt"] == "gcd 2 of aime"
    written = {(one.set, one.prompt.index - FIRST[one.set]): one for one in groups}
    for row in rows[:4] + rows[5:]:
        one, number = written[row["set"], row["prompt_index"]], int(row["uid"].split(".")[1])
        assert (row["step"], row["attempt"], row["version"], row["engine"]) == (40, 4, 40, f"engine-{number}")
        assert row["prompt"] == f"gcd {row['prompt_index']} of {row['set']}"
        assert row["answer"] == f"answer {row['prompt_index']} {number}"
        assert row["prompt_ids"] == list(one.prompt.ids)
        assert row["answer_ids"] == list(one.samples[number].ids)
        assert row["rollout_log_probs"] == [-0.5] * len(row["answer_ids"])
        assert row["score"] == row["verifier_score"] == one.scores[number]
        assert row["advantage"] is row["old_log_probs"] is row["dropped"] is None


def test_a_file_has_the_parts_of_each_reward(tmp_path: Path) -> None:
    plain = group("aime", 0)
    parted = replace(plain, scores=[Reward(score, {"format": score / 4}) for score in plain.scores])
    assert parted.bytes > plain.bytes, "parts wait for the store too"
    write(writer(tmp_path), 20, [parted, group("aime", 1), group("aime", 2, refused="too long")])
    rows = list(samples(tmp_path, validation=True))
    assert [(row["score"], row["reward_parts"]) for row in rows] == [
        (0.0, {"format": 0.0}), (0.5, {"format": 0.125}), (1.0, None), (1.5, None), (None, None),
    ]  # fmt: skip


def test_blocks_do_not_show_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [group("aime", place, answers=3) for place in (4, 0, 3, 1, 2)]
    write(writer(tmp_path), 1, groups)
    monkeypatch.setattr(validation_writer, "ROWS", 4)
    write(writer(tmp_path), 2, groups)
    one, two = (
        [row | {"step": 0, "time": 0} for row in samples(tmp_path, step, validation=True)] for step in (1, 2)
    )
    assert one == two and len(one) == 15


def test_of_each_set_the_first_prompts_are_kept(tmp_path: Path) -> None:
    groups = [group(of, place) for of in ("aime", "math") for place in (3, 1, 0, 2)]
    writing = writer(tmp_path, SamplesSpec(validation_prompts=2))
    for version in (0, 10):
        write(writing, version, groups)
        kept = {(row["set"], row["prompt_index"]) for row in samples(tmp_path, version, validation=True)}
        assert kept == {("aime", 0), ("aime", 1), ("math", 0), ("math", 1)}
    write(writer(tmp_path / "none", SamplesSpec(validation_prompts=0)), 0, groups)
    assert not (tmp_path / "none").exists()


def test_a_repeated_validation_replaces_its_file_and_later_ones_are_removed(tmp_path: Path) -> None:
    for version in (0, 20, 40):
        write(writer(tmp_path), version, [group("aime", 0)])
    again = writer(tmp_path)
    again.truncate(20)
    write(again, 20, [group("aime", 0, text="another")], attempt=5)
    assert sample_steps(tmp_path / FILES) == [0, 20]
    found = list(samples(tmp_path, 20, validation=True))
    assert len(found) == 2 and {row["attempt"] for row in found} == {5}
    assert found[0]["prompt"] == "another 0 of aime"


def test_a_validation_that_did_not_end_leaves_nothing(tmp_path: Path) -> None:
    writing = writer(tmp_path)
    writing.begin(20, 1)
    writing.asked("aime", FIRST["aime"])
    writing.add(group("aime", 0))
    writing.flush()
    with pytest.raises(LookupError, match="validationPrompts"):
        list(samples(tmp_path, validation=True))  # what is being written is no file of a step
    writing.end(complete=False)
    writing.flush()
    assert list((tmp_path / FILES).iterdir()) == []
    assert writing.metrics()["samples/missing_validations"] == 0
    assert write(writing, 40, [group("aime", 0)]) == 0


def test_a_store_that_is_too_slow_costs_the_file_and_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def slow(rows: Sequence[Sequence[int]]) -> list[str]:
        answered.wait(30)
        return TOKENIZER.decode_all(rows)

    monkeypatch.setattr(validation_writer, "ROWS", 1)
    monkeypatch.setattr(validation_writer, "WAITING_BYTES", 3 * group("aime", 0).bytes)
    writing = writer(tmp_path, decode=slow)
    writing.begin(20, 1)
    for place in range(9):
        writing.asked("aime", FIRST["aime"] + place)
        writing.add(group("aime", place))
    writing.end(complete=True)
    answered.set()
    writing.flush()
    assert writing.metrics()["samples/missing_validations"] == 1 and sample_steps(tmp_path / FILES) == []
    assert write(writing, 40, [group("aime", 0)]) == 1, "the next one has its file"
    assert sample_steps(tmp_path / FILES) == [40]


def test_a_group_of_any_size_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation_writer, "WAITING_BYTES", 1)
    assert write(writer(tmp_path), 20, [group("aime", 0)]) == 0


def test_a_superseded_controller_and_a_full_store_cost_the_file(tmp_path: Path) -> None:
    def superseded() -> None:
        raise SupersededError("attempt 6 has begun")

    assert write(writer(tmp_path, check=superseded), 20, [group("aime", 0)]) == 1
    assert list((tmp_path / FILES).iterdir()) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / FILES).write_text("no folder")
    assert write(writer(tmp_path / "full"), 20, [group("aime", 0)]) == 1


def test_the_program_prints_samples_of_validations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in (0, 20):
        write(writer(tmp_path), version, [group("aime", 0), group("aime", 1), group("math", 0)])

    def printed(*options: str) -> list[tuple[int, str, str]]:
        show_samples.main([str(tmp_path), *options])
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [(row["step"], row["set"], row["uid"]) for row in rows]

    assert len(printed("--validation")) == 6 and printed("--validation", "--limit=1") == [(20, "aime", "0.0")]
    assert printed("--set=math", "--step=0") == [(0, "math", "0.0"), (0, "math", "0.1")]
    assert printed("--set=aime", "--prompt=1", "--order=-score", "--limit=1") == [(20, "aime", "1.1")]
    for options, why in (
        (["--set=mmlu"], "some of aime, math"),
        (["--validation", "--step=9"], "steps 0 to 20"),
    ):
        with pytest.raises(SystemExit, match=why):
            printed(*options)
    with pytest.raises(SystemExit, match=r"spec\.observability\.samples$"):
        printed("--step=20")
