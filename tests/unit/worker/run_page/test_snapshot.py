"""The data of a page, read from a job's folder."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from upath import UPath

from grpo_worker.common.log_pieces import LogPieces
from grpo_worker.common.step_log import records_from
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller import show_page
from grpo_worker.controller.status.page_file import FILE, write_page
from grpo_worker.run_page.limits import Limits
from grpo_worker.run_page.records import new_records, new_recoveries, step_records
from grpo_worker.run_page.samples import step_samples
from grpo_worker.run_page.snapshot import Run, snapshot
from grpo_worker.samples import table
from support.run_pages import (
    ANSWERS,
    MODEL,
    TOKENIZER,
    metrics_of,
    record,
    write_records,
    write_restarts,
    write_samples,
)


def _run(folder: Path, total: int | None = None) -> Run:
    return Run(folder.name, JobFolder(folder, folder), total, TOKENIZER.decode_all)


def test_a_snapshot_has_all_that_the_folder_has(tmp_path: Path) -> None:
    write_records(tmp_path, range(1, 41))
    write_restarts(tmp_path, (37, "infrastructure", "rank 3"), (38, "job", "NaN"))
    for step in range(1, 31):
        write_samples(tmp_path, step, ["one", "two", "three"], ["yes", "no"])
    found = snapshot(_run(tmp_path, 40), Limits(steps=3, groups=2, answers=3))
    points = {one["name"]: [list(point) for point in one["points"]] for one in found["series"]}
    assert points == metrics_of(tmp_path)
    assert found["status"]["phase"] == "Succeeded" and found["status"]["restarts"] == 2
    assert found["main"] == 7 and found["series"][0]["name"] == "critic/score/mean"
    samples = found["samples"]
    assert (samples["count"], samples["first"], samples["last"]) == (30, 1, 30)
    assert [step["step"] for step in samples["steps"]] == [1, 15, 30]
    for step in samples["steps"]:
        assert step["of"] == 3 and [len(group["answers"]) for group in step["shown"]] == [3, 3]
        assert {group["of"] for group in step["shown"]} == {ANSWERS}
    json.dumps(found, allow_nan=False)


def test_an_empty_folder_has_a_page(tmp_path: Path) -> None:
    found = snapshot(_run(tmp_path))
    assert found["series"] == [] and found["samples"]["steps"] == [] and found["last"]["step"] == 0
    assert found["status"]["phase"] == "Not ended"


def test_the_rows_of_a_prompt_are_read_from_the_blocks_that_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "ROWS", 3)
    rollouts = write_samples(tmp_path, 5, ["a", "b", "c", "d"], ["yes", "no", "perhaps"])
    read: list[int] = []
    original = pq.ParquetFile.read_row_group

    def noted(file: pq.ParquetFile, number: int, **options: Any) -> Any:
        read.append(number)
        return original(file, number, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    found = step_samples(tmp_path, 5, 2, TOKENIZER.decode_all, Limits())
    (group,) = found["shown"]
    expected = {s.uid: TOKENIZER.decode_all([s.ids])[0] for s in rollouts.samples if s.prompt_index == 2}
    assert {answer["uid"]: answer["text"] for answer in group["answers"]} == expected
    assert ["".join(one["tokens"]["pieces"]) for one in group["answers"]] == [
        one["text"] for one in group["answers"]
    ]
    assert read == [2, 3], "samples 8 to 11 are in blocks of three"
    with pytest.raises(LookupError, match="prompt 9 in step 5"):
        step_samples(tmp_path, 5, 9, None, Limits())
    with pytest.raises(LookupError, match="of step 4"):
        step_samples(tmp_path, 4, None, None, Limits())


def test_the_parts_of_rewards_are_read_and_older_files_have_none(tmp_path: Path) -> None:
    write_samples(tmp_path, 5, ["a", "b"], ["yes", "no"], parts=True)

    def shown() -> list[tuple[float, dict[str, float]]]:
        groups = step_samples(tmp_path, 5, None, None, Limits())["shown"]
        return [(one["score"], one["parts"]) for group in groups for one in group["answers"]]

    parted = shown()
    assert {tuple(parts) for _, parts in parted} == {("format", "correct")}
    assert all(parts["format"] == score / 2 for score, parts in parted)
    file = tmp_path / "samples" / "00000005.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["reward_parts"]), file)
    assert shown() == [(score, {}) for score, _ in parted]


def _steps(records: list[dict[str, Any]] | None) -> list[int] | None:
    return None if records is None else [one["step"] for one in records]


def test_new_records_follow_one_that_is_still_the_same(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, tmp_path)
    assert new_records(folder, 0, 0.0) == []
    write_records(tmp_path, range(1, 6))
    time = record(3)["wall_time"]
    assert _steps(new_records(folder, 0, 0.0)) == [0, 1, 2, 3, 4, 5]
    assert _steps(new_records(folder, 3, time)) == [3, 4, 5]
    assert _steps(new_records(folder, 3, time + 1)) is None, "step 3 was repeated"
    assert _steps(new_records(folder, 9, time)) == [], "steps that were lost are not there yet again"
    write_records(tmp_path, [5], lambda step: record(step) | {"step": 5})
    assert _steps(new_records(folder, 5, record(5)["wall_time"])) == [5]


def test_new_records_are_bounded(tmp_path: Path) -> None:
    write_records(tmp_path, range(1, 200))
    found = records_from(tmp_path / "metrics.jsonl", 50, 4000)
    assert found[0]["step"] == 50 and 3000 < sum(len(json.dumps(one)) for one in found) <= 4100
    assert len(records_from(tmp_path / "metrics.jsonl", 50, 1)) == 1
    assert records_from(tmp_path / "nothing.jsonl", 1, 1) == []


def test_new_restarts_are_those_at_the_end_of_the_file(tmp_path: Path) -> None:
    write_restarts(tmp_path, *[(step, "job", "x" * 200) for step in range(1, 1000)])
    found = new_recoveries(JobFolder(tmp_path, tmp_path), 5)
    assert found[-1]["step"] == 999 and 100 < len(found) < 300
    assert [line["step"] for line in new_recoveries(JobFolder(tmp_path, tmp_path), 998)] == [998, 999]


def test_an_object_store_has_pieces_samples_and_the_page(tmp_path: Path) -> None:
    store, disk = UPath(f"memory:/{tmp_path}/job"), tmp_path / "disk"
    pieces = LogPieces(store / "metrics.jsonl")
    for first, last in ((1, 2), (3, 4)):
        lines = [json.dumps(record(step) | {"step": step}) for step in range(first, last + 1)]
        pieces.add(first, last, "".join(f"{line}\n" for line in lines).encode())
    write_records(disk, [4, 5])  # the pod has begun with step 4
    with (disk / "metrics.jsonl").open("a") as log:
        log.write('{"step": 6, "torn')
    write_samples(disk, 5, ["one", "two"], ["yes"], store)
    folder = JobFolder(store, disk)
    assert [one["step"] for one in step_records(folder)] == [1, 2, 3, 4, 5]
    found = snapshot(Run("job", folder, 5, TOKENIZER.decode_all))
    assert found["steps"] == 5 and found["samples"]["steps"][0]["shown"][0]["answers"][0]["text"] == "yes"
    write_page(Run("job", folder, 5))
    assert "critic/score/mean" in (store / FILE).read_text() and not (disk / FILE).exists()


def test_a_damaged_log_is_shown_up_to_the_damage(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "a"\n{"step": 3}\n')
    assert [one["step"] for one in step_records(JobFolder(tmp_path, tmp_path))] == [1]


def test_the_page_of_an_ended_run_is_written_and_its_failure_costs_nothing(tmp_path: Path) -> None:
    write_records(tmp_path, [1])
    write_page(_run(tmp_path, 1))
    assert "critic/score/mean" in (tmp_path / FILE).read_text()
    (tmp_path / FILE).unlink()

    def superseded() -> None:
        raise RuntimeError("attempt 6 has begun")

    write_page(_run(tmp_path, 1), superseded)
    (tmp_path / "run.json").write_text("{damaged")
    write_page(_run(tmp_path, 1))
    assert not (tmp_path / FILE).exists()


def test_the_program_prints_the_page_its_data_or_samples(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    write_records(tmp_path, [1, 2])
    write_samples(tmp_path, 2, ["one"], ["yes"])
    for options, text in (
        ([], b"<!doctype html>"),
        (["--data", "--total=2"], b'"phase": "Succeeded"'),
        (["--step=2", f"--model={MODEL}"], b'"pieces": ["y", "es"]'),
        (["--step=2", "--model=/nowhere"], b'"pieces": ["'),
    ):
        show_page.main([str(tmp_path), *options])
        assert text in capsysbinary.readouterr().out
    with pytest.raises(SystemExit, match="no samples of step 9"):
        show_page.main([str(tmp_path), "--step=9"])
