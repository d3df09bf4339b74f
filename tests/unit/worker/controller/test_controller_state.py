"""What survives a restart: cursor, ledger, checkpoints, records; and who gets requests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from upath import UPath

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.checkpointing import store
from grpo_worker.checkpointing.attempts import SupersededError
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.generation.sample_ledger import SampleLedger
from grpo_worker.controller.recovery.run_record import RunRecord
from grpo_worker.data.build_tiny_tokenizer import build
from grpo_worker.data.prompts import Prompt, PromptSource
from grpo_worker.data.tasks import open_gym
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.model_files.names import TINY_TOKENIZER
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.routing import EngineEntry, EngineTable
from grpo_worker.rollout.sampling import Sample
from grpo_worker.rollout.train_batch import make_batch

GCD = "reasoning-gym:gcd?min_numbers=2&max_numbers=2&min_value=1&max_value=20"

ORIGIN = store.Origin("0123abcd", "TP2 PP1 CP1 EP2 DP1")


def source() -> PromptSource:
    return PromptSource(open_gym(GCD, seed=3), load_tokenizer("preset:tiny-moe"), 64)


def sample(index: int, number: int = 0) -> Sample:
    return Sample(index, number, (5, 6), (-0.5, -0.25), 1, "e0")


def test_prompts_in_flight_at_a_checkpoint_come_again_and_no_other_does() -> None:
    first = source()
    taken = first.take(4)
    first.consumed(taken[:3])
    second = source()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    again = second.take(3)
    assert [p.index for p in again] == [3, 4, 5]
    assert second.take(3) == again  # a step that failed before its update sees the same prompts
    second.consumed(again)
    assert [p.index for p in second.take(2)] == [6, 7]


def test_the_same_index_is_the_same_prompt_in_every_process() -> None:
    assert source().take(3) == source().take(3)


def test_a_prompt_that_is_too_long_names_the_field() -> None:
    short = PromptSource(open_gym(GCD, 3), load_tokenizer("preset:tiny-moe"), 8)
    with pytest.raises(ValueError, match=r"spec\.data\.promptLength=8"):
        short.take(1)


@pytest.mark.parametrize(
    ("uri", "text"), [("reasoning-gym:nope", "nope"), ("reasoning-gym:gcd?colour=1", "colour")]
)
def test_unknown_tasks_and_options_are_named(uri: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        open_gym(uri, 0)


def test_the_verifier_scores_the_text_of_the_answer() -> None:
    task = open_gym(GCD, 3)
    answer = task.dataset[0]["answer"]
    assert task.score(0, answer) == 1.0
    assert 0 < task.score(0, answer + "xyz") < 1 and task.score(0, "") == 0.0


def test_the_committed_tokenizer_is_the_one_that_its_script_builds() -> None:
    assert json.loads(build().to_str()) == json.loads(TINY_TOKENIZER.read_text())
    tokenizer = load_tokenizer("preset:tiny-moe")
    assert tokenizer.decode(tokenizer.encode("what is 12 + 7?")) == "what is 12 + 7?"


def test_ledger_forgets_replayed_steps_and_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = SampleLedger(JobFolder(tmp_path, tmp_path))
    for step in (1, 2, 3):
        ledger.append(step, 1, [sample(step)])
    ledger.flush()
    with path.open("a") as handle:
        handle.write('{"step": 4, "uid')  # the process died here
    ledger.truncate(2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_records_survive_and_count_by_cause(tmp_path: Path) -> None:
    record = RunRecord.load(tmp_path / "run.json")
    record.begin_attempt()
    record.count_restart("infrastructure")
    again = RunRecord.load(tmp_path / "run.json")
    assert (again.attempt, again.job_restarts, again.infrastructure_restarts) == (1, 0, 1)


def test_who_was_superseded_writes_nothing_any_more(tmp_path: Path) -> None:
    """A controller on a node that is cut off, and the one that Kubernetes started in its place."""
    cut_off = RunRecord.load(tmp_path / "run.json")
    cut_off.begin_attempt()
    cut_off.check()
    other = RunRecord.load(tmp_path / "run.json")
    other.begin_attempt()
    text = (tmp_path / "run.json").read_text()
    calls: list[Callable[[], object]] = [cut_off.check, cut_off.begin_attempt]
    calls += [lambda: cut_off.fail("x"), lambda: cut_off.count_restart("job")]
    for call in calls:
        with pytest.raises(
            SupersededError, match="attempt 2 has begun in another controller; this one is attempt 1"
        ):
            call()
    assert (tmp_path / "run.json").read_text() == text
    other.begin_attempt()
    assert other.attempt == 3


def _checkpoint(root: Path, step: int, complete: bool = True) -> Path:
    path = store.directory(root, step)
    path.mkdir(parents=True)
    (path / "data.distcp").write_bytes(b"x" * step)
    if complete:
        store.commit(root, step, ORIGIN)
    return path


def test_only_complete_checkpoints_count_and_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        _checkpoint(tmp_path, step)
    _checkpoint(tmp_path, 12, complete=False)
    _checkpoint(tmp_path, 20, complete=False)  # still being written
    assert store.complete_steps(tmp_path) == [5, 10, 15]
    store.prune(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{s:08d}" for s in (10, 15, 20)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda marker: marker.unlink(), "never completed"),
        (lambda marker: marker.write_text('{"format": 1, "files"'), "cannot be read"),
        (lambda marker: _replace(marker, '"origin"', '"from"'), "cannot be read"),
        (lambda marker: _replace(marker, '"format": 1', '"format": 2'), "has format 2, .* up to 1: use"),
        (lambda marker: _replace(marker, "0123abcd", "ffff"), "is of another model .* set spec.model.path"),
        (
            lambda marker: (marker.parent / "data.distcp").write_bytes(b"x"),
            "not 5 bytes long .it has 1.; remove",
        ),
    ],
    ids=["torn", "half-marker", "no-origin", "newer", "foreign", "truncated"],
)
def test_a_checkpoint_that_cannot_be_loaded_says_what_to_do(
    tmp_path: Path, change: Callable[[Path], Any], message: str
) -> None:
    path = _checkpoint(tmp_path, 5)
    assert store.verify(path, ORIGIN.model) == ORIGIN
    change(path / store.MARKER)
    with pytest.raises(ValueError, match=message):
        store.verify(path, ORIGIN.model)


@pytest.mark.fault(
    row="22",
    point="a file of the newest checkpoint is truncated",
    witness="its marker is taken",
    bound="at the load",
    partial="files only, no ranks",
)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(tmp_path: Path) -> None:
    for step in (4, 8):
        path = store.directory(tmp_path, step)
        path.mkdir()
        (path / "__0_0.distcp").write_bytes(b"0123")
        store.commit(tmp_path, step, ORIGIN)
    assert store.newest_sound(tmp_path, ORIGIN.model) == store.directory(tmp_path, 8)
    (store.directory(tmp_path, 8) / "__0_0.distcp").write_bytes(b"01")
    assert store.newest_sound(tmp_path, ORIGIN.model) == store.directory(tmp_path, 4)
    assert store.complete_steps(tmp_path) == [4]
    with pytest.raises(ValueError, match="another model"):
        store.newest_sound(tmp_path, "of another model")
    assert store.complete_steps(tmp_path) == [4], "a checkpoint of another model is not damaged"


def test_a_changed_small_file_is_damage(tmp_path: Path) -> None:
    path = store.directory(tmp_path, 4)
    path.mkdir()
    (path / ".metadata").write_bytes(b"0123")
    store.commit(tmp_path, 4, ORIGIN)
    (path / ".metadata").write_bytes(b"0124")
    assert store.verify(path, ORIGIN.model) == ORIGIN, "ranks look at the sizes only"
    with pytest.raises(
        store.DamagedCheckpointError, match=r"\.metadata was changed after the save .its sha256 is .*; remove"
    ):
        store.verify(path, ORIGIN.model, contents=True)
    assert store.newest_sound(tmp_path, ORIGIN.model) is None


def _replace(marker: Path, old: str, new: str) -> None:
    marker.write_text(marker.read_text().replace(old, new))


def test_a_batch_places_every_value_at_its_token() -> None:
    prompts = [Prompt(7, (10, 11, 12))]
    batch = make_batch(prompts, [sample(7)])
    assert batch.input_ids is not None and batch.input_ids.tolist() == [10, 11, 12, 5, 6]
    assert (batch.prompt_lengths.tolist(), batch.lengths.tolist(), batch.width) == ([3], [5], 5)
    assert batch.response["rollout_log_probs"].tolist() == [-0.5, -0.25]


def test_requests_go_only_to_engines_at_the_wanted_version() -> None:
    table = EngineTable()
    table.replace(
        [
            EngineEntry("a", "1", EngineState.SERVING, 4),
            EngineEntry("b", "2", EngineState.SERVING, 3),
            EngineEntry("c", "3", EngineState.STALE, None),
        ]
    )
    assert [e.name for e in table.serving(4)] == ["a"]
    assert [e.name for e in table.serving(3, newer=True)] == ["a", "b"], "for answers that may go on"
    assert table.serving(5, newer=True) == []
    table.suspect("a", "died")
    assert table.serving(4) == []


def test_a_sample_of_two_versions_keeps_its_spans(tmp_path: Path) -> None:
    mixed = Sample(0, 0, (5, 6, 7), (-0.5, -0.25, -0.1), 3, "e0", ((3, 1), (4, 3)))
    prompt = Prompt(0, (1, 2))
    generated = RolloutBatch([prompt], [mixed, sample(0, 1)], [1.0, 0.0], [prompt])
    generated.write(tmp_path / "step.npz")
    assert RolloutBatch.read(tmp_path / "step.npz") == generated
    ledger = SampleLedger(JobFolder(tmp_path, tmp_path))
    ledger.append(5, 1, generated.samples)
    ledger.flush()
    first, second = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert first["spans"] == [[3, 1], [4, 3]] and first["version"] == 3 and first["tokens"] == 3
    assert "spans" not in second


def test_a_batch_knows_the_versions_of_its_tokens() -> None:
    whole = Sample(0, 0, (5, 6), (-0.5, -0.25), 3, "e0")
    continued = Sample(1, 0, (5, 6, 7), (-0.5, -0.25, -0.1), 2, "e0", spans=((2, 1), (4, 3)))
    assert RolloutBatch([], [whole]).versions == (3, 3)
    assert RolloutBatch([], [whole, continued]).versions == (2, 4)


def test_a_batch_in_an_object_store_is_that_of_a_file() -> None:
    prompts = [Prompt(0, (1, 2)), Prompt(1, (3,))]
    generated = RolloutBatch(prompts[:1], [sample(0)], [1.0], prompts, refused={1: "too long"}, cut=3)
    place = UPath("memory://runs/pending/step-00000001.attempt-1.npz")
    generated.write(place)
    assert RolloutBatch.read(place) == generated


def test_refused_prompts_are_recorded(tmp_path: Path) -> None:
    prompts = [Prompt(0, (1, 2)), Prompt(1, (3,))]
    generated = RolloutBatch(prompts[:1], [sample(0)], [1.0], prompts, refused={1: "too long"}, cut=3)
    generated.write(tmp_path / "step.npz")
    assert RolloutBatch.read(tmp_path / "step.npz") == generated
    ledger = SampleLedger(JobFolder(tmp_path, tmp_path))
    ledger.append(5, 1, generated.samples, (), generated.refused)
    ledger.flush()
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert lines[1] == {"step": 5, "attempt": 1, "prompt": 1, "refused": "too long"}
