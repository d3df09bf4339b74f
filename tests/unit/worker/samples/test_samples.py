"""The samples of a step in its Parquet file."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest

from grpo_operator.api.v1alpha1.observability import SamplesSpec
from grpo_worker.checkpointing.attempts import SupersededError
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.common.reward_parts import Reward
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller import show_samples
from grpo_worker.data.prompts import Prompt
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import Sample
from grpo_worker.rollout.train_batch import make_batch
from grpo_worker.samples import table
from grpo_worker.samples.reader import samples
from grpo_worker.samples.writer import SampleWriter

TOKENIZER = load_tokenizer("preset:tiny-moe")
ANSWERS = 3  # to each prompt


def rollouts(prompts: int = 2, text: str = "gcd") -> RolloutBatch:
    """Return samples of a step; a prompt more is left out, another one is refused."""
    taken = [Prompt(index, tuple(TOKENIZER.encode(f"{text} {index}"))) for index in range(prompts + 2)]
    trained = taken[:prompts]
    made = [_sample(prompt.index, number) for prompt in trained for number in range(ANSWERS)]
    left_out = [_sample(prompts, number) for number in range(ANSWERS)]
    scores = [float(sample.number) for sample in made]
    return RolloutBatch(trained, made, scores, taken, left_out, {prompts + 1: "too long"})


def _sample(index: int, number: int) -> Sample:
    ids = TOKENIZER.encode(f"answer {index} {number}")
    spans = ((6, 2), (7, len(ids))) if number else ()
    return Sample(index, number, ids, [-0.5] * len(ids), 6, "engine-0", spans)


def batch(of: RolloutBatch) -> RaggedBatch:
    made = make_batch(of.prompts, of.samples)
    old = made.response["rollout_log_probs"] + np.float32(0.25)
    return made.with_columns(old_log_probs=old).with_rows(advantages=np.arange(made.rows, dtype=np.float32))


def writer(
    folder: Path, spec: SamplesSpec | None = None, check: Callable[[], None] = lambda: None
) -> SampleWriter:
    return SampleWriter(JobFolder(folder, folder), spec or SamplesSpec(), TOKENIZER.decode_all, check)


def write(folder: Path, step: int, of: RolloutBatch, spec: SamplesSpec | None = None) -> SampleWriter:
    writing = writer(folder, spec)
    writing.add(step, 4, of, [score + 10 for score in of.scores], batch(of))
    writing.flush()
    return writing


def test_a_file_has_every_sample_of_a_step_with_its_text_tokens_and_figures(tmp_path: Path) -> None:
    of = rollouts()
    assert write(tmp_path, 7, of).metrics()["samples/missing_steps"] == 0
    frame = pandas.read_parquet(tmp_path / "samples" / "00000007.parquet")
    assert list(frame["uid"].dropna()) == [s.uid for s in (*of.samples, *of.left_out)]
    trained = frame[frame["dropped"].isna()]
    for row, sample in zip(trained.to_dict("records"), of.samples, strict=True):
        assert (row["step"], row["attempt"], row["version"], row["engine"]) == (7, 4, 6, "engine-0")
        assert list(row["answer_ids"]) == list(sample.ids)
        assert row["answer"] == TOKENIZER.decode_all([sample.ids])[0]
        assert row["answer"] == f"answer {sample.prompt_index} {sample.number}"
        assert row["prompt"] == f"gcd {sample.prompt_index}"
        assert np.allclose(row["old_log_probs"], -0.25) and np.allclose(row["rollout_log_probs"], -0.5)
        assert (row["log_prob_gap_mean"], row["log_prob_gap_max"]) == (0.25, 0.25)
        assert [(s["version"], s["end"]) for s in row["spans"]] == list(sample.spans)
        assert (row["score"], row["verifier_score"]) == (sample.number + 10, sample.number)
    assert list(trained["advantage"]) == list(range(len(of.samples)))
    assert list(frame["dropped"][len(of.samples) :]) == [table.EQUAL_SCORES] * ANSWERS + ["too long"]


def with_parts(of: RolloutBatch) -> RolloutBatch:
    """Return the samples with rewards that have parts, but for those with the number 1."""
    for row, sample in enumerate(of.samples):
        parts = {"format": sample.number / 4, "gr": float(sample.prompt_index)}
        of.scores[row] = of.scores[row] if sample.number == 1 else Reward(of.scores[row], parts)
    return of


def test_a_file_has_the_parts_of_each_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 1, with_parts(rollouts()))
    found = {row["uid"]: row["reward_parts"] for row in samples(tmp_path)}
    assert found == {
        "0.0": {"format": 0.0, "gr": 0.0}, "0.1": None, "0.2": {"format": 0.5, "gr": 0.0},
        "1.0": {"format": 0.0, "gr": 1.0}, "1.1": None, "1.2": {"format": 0.5, "gr": 1.0},
        "2.0": None, "2.1": None, "2.2": None, None: None,
    }  # fmt: skip
    best = printed(capsys, tmp_path, "--order=-score", "--limit=1", "--prompt=1")
    assert best[0]["reward_parts"] == {"format": 0.5, "gr": 1.0}
    frame = pandas.read_parquet(tmp_path / "samples" / "00000001.parquet")
    assert frame["reward_parts"][0] == [("format", 0.0), ("gr", 0.0)]


def test_rewards_without_parts_leave_the_column_empty(tmp_path: Path) -> None:
    write(tmp_path, 1, rollouts())
    assert {row["reward_parts"] for row in samples(tmp_path)} == {None}


def test_files_that_were_written_before_there_were_parts_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 1, with_parts(rollouts()))
    file = tmp_path / "samples" / "00000001.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["reward_parts"]), file)
    rows = printed(capsys, tmp_path, "--order=-score")
    assert len(rows) == 3 * ANSWERS + 1 and rows[0]["score"] == 12 and "reward_parts" not in rows[0]


def test_blocks_do_not_show_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = with_parts(rollouts(prompts=5))
    write(tmp_path, 1, of)
    monkeypatch.setattr(table, "ROWS", 4)
    write(tmp_path, 2, of)
    first, second = ([row | {"step": 0, "time": 0} for row in samples(tmp_path, step)] for step in (1, 2))
    assert first == second and len(first) == 5 * ANSWERS + ANSWERS + 1


def test_an_empty_answer_has_no_gap(tmp_path: Path) -> None:
    of = RolloutBatch([Prompt(0, (5,))], [Sample(0, 0, [], [], 1, "e")], [0.0], [Prompt(0, (5,))])
    write(tmp_path, 1, of)
    (row,) = samples(tmp_path)
    assert row["answer"] == "" and row["log_prob_gap_mean"] is None


def test_only_some_steps_and_prompts_are_written_if_the_spec_says_so(tmp_path: Path) -> None:
    spec = SamplesSpec(every_steps=2, prompts=1)
    for step in (1, 2, 3):
        write(tmp_path, step, rollouts(), spec)
    assert [file.name for file in (tmp_path / "samples").iterdir()] == ["00000002.parquet"]
    assert {row["prompt_index"] for row in samples(tmp_path)} == {0}
    write(tmp_path / "none", 2, rollouts(), SamplesSpec(every_steps=0))
    assert not (tmp_path / "none").exists()


def test_a_replay_replaces_the_file_of_its_step_and_removes_those_of_later_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, rollouts())
    again = writer(tmp_path)
    again.truncate(1)
    of = rollouts(text="another")
    again.add(2, 5, of, of.scores, batch(of))
    again.flush()
    assert sorted(file.name for file in (tmp_path / "samples").iterdir()) == [
        "00000001.parquet",
        "00000002.parquet",
    ]
    found = list(samples(tmp_path, 2))
    assert {row["attempt"] for row in found} == {5} and found[0]["prompt"] == "another 0"
    assert {row["attempt"] for row in samples(tmp_path, 1)} == {4}


def test_a_superseded_controller_writes_nothing(tmp_path: Path) -> None:
    def superseded() -> None:
        raise SupersededError("attempt 6 has begun")

    of, old = rollouts(), writer(tmp_path, check=superseded)
    old.add(1, 4, of, of.scores, batch(of))
    old.flush()
    assert old.metrics()["samples/missing_steps"] == 1
    assert not list((tmp_path / "samples").glob("*.parquet"))


def test_a_store_that_is_slower_than_the_steps_costs_files_and_no_step(tmp_path: Path) -> None:
    answered = threading.Event()

    def slow(rows: Sequence[Sequence[int]]) -> list[str]:
        answered.wait(30)
        return TOKENIZER.decode_all(rows)

    of = rollouts()
    writing = SampleWriter(JobFolder(tmp_path, tmp_path), SamplesSpec(), slow, lambda: None)
    writing.add(1, 1, of, of.scores, batch(of))
    writing.add(2, 1, of, of.scores, batch(of))
    answered.set()
    writing.flush()
    writing.add(3, 1, of, of.scores, batch(of))
    writing.flush()
    assert sorted(file.stem for file in (tmp_path / "samples").iterdir()) == ["00000001", "00000003"]
    assert writing.metrics()["samples/missing_steps"] == 1


def test_a_full_store_costs_the_file(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("no folder")
    assert write(tmp_path, 1, rollouts()).metrics()["samples/missing_steps"] == 1


def printed(capsys: pytest.CaptureFixture[str], *arguments: Any) -> list[dict[str, Any]]:
    show_samples.main([str(argument) for argument in arguments])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_program_prints_the_samples_that_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        write(tmp_path, step, rollouts())
    (tmp_path / "samples" / "draft").write_text("the next step, which is being written")
    assert {row["step"] for row in printed(capsys, tmp_path)} == {2}
    best = printed(capsys, tmp_path, "--step=1", "--prompt=1", "--order=-score", "--limit=2")
    assert [row["uid"] for row in best] == ["1.2", "1.1"] and "answer_ids" not in best[0]
    (one,) = printed(capsys, tmp_path, "--limit=1", "--tokens")
    assert one["answer_ids"] == list(rollouts().samples[0].ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--step=9"], "of steps 1 to 1"), (["--order=colour"], "there is no column colour")],
)
def test_the_program_says_what_there_is(tmp_path: Path, options: list[str], message: str) -> None:
    write(tmp_path, 1, rollouts())
    with pytest.raises(SystemExit, match=message):
        show_samples.main([str(tmp_path), *options])


def test_the_program_names_the_field_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"spec\.observability\.samples"):
        show_samples.main([str(tmp_path)])
