"""What trackers of experiments get of a run: a choice of its samples, its page, its checkpoints."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from upath import UPath

from grpo_operator.api.v1alpha1.observability import MlflowSpec
from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.checkpointing.best import Best, keep_best
from grpo_worker.checkpointing.store import directory
from grpo_worker.common.reward_parts import Reward
from grpo_worker.common.store_path import JobFolder, StorePath
from grpo_worker.controller.run_artifacts import checkpoints, run_artifacts
from grpo_worker.controller.status.page_file import FILE
from grpo_worker.controller.tracked_samples import (
    COLUMNS,
    FirstSamples,
    Tracked,
    chosen_of_step,
    sample_table,
)
from grpo_worker.data.prompts import Prompt
from grpo_worker.metrics.sinks.mlflow import Mlflow
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import Sample
from grpo_worker.rollout.train_batch import make_batch
from grpo_worker.samples.validation_table import ValidatedGroup
from support.loop_world import World


def decode(texts: Sequence[Sequence[int]]) -> list[str]:
    return ["".join(map(chr, ids)) for ids in texts]


def prompt(index: int) -> Prompt:
    return Prompt(index, tuple(map(ord, f"question {index}")))


def sample(index: int, number: int, text: str = "answer") -> Sample:
    ids = list(map(ord, text))
    return Sample(index, number, ids, [-0.5] * len(ids), 6, "engine-0")


def rows(samples: Sequence[Tracked]) -> list[dict[str, Any]]:
    table = sample_table("samples", 7, samples, decode)
    assert table.columns == COLUMNS and (table.name, table.step) == ("samples", 7)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def step(scores: Sequence[float]) -> list[Tracked]:
    prompts = [prompt(index) for index in range(len(scores) // 2)]
    samples = [sample(one.index, number) for one in prompts for number in range(2)]
    rollouts = RolloutBatch(prompts, samples, list(scores), prompts)
    batch = make_batch(prompts, samples).with_rows(advantages=np.arange(len(scores), dtype=np.float32))
    return chosen_of_step(rollouts, [score + 10 for score in scores], batch, 3)


def test_a_step_is_shown_by_few_samples_from_the_best_to_the_worst() -> None:
    found = rows(step([0.0, 0.5, Reward(1.0, {"format": 0.25}), 0.25, 0.75, -1.0]))
    assert [row["score"] for row in found] == [11.0, 10.5, 9.0], "with the reward model's part"
    assert [row["advantage"] for row in found] == [2.0, 1.0, 5.0]
    assert [row["prompt"] for row in found] == ["question 1", "question 0", "question 2"]
    assert [row["reward_parts"] for row in found] == ['{"format": 0.25}', None, None]
    first = {name: found[0][name] for name in ("step", "set", "response", "response_tokens", "version")}
    assert first == {"step": 7, "set": "train", "response": "answer", "response_tokens": 6, "version": 6}


def test_one_sample_is_the_best_one() -> None:
    prompts = [prompt(0)]
    samples = [sample(0, number) for number in range(3)]
    rollouts = RolloutBatch(prompts, samples, [0.0, 1.0, 0.5], prompts)
    (one,) = chosen_of_step(rollouts, [0.0, 1.0, 0.5], make_batch(prompts, samples), 1)
    assert one.score == 1.0 and one.advantage is None


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = "begin" + "x" * 100_000 + "the end"
    (row,) = rows([Tracked(prompt(0), sample(0, 0, text), 1.0, {})])
    assert row["response"].startswith("beginx") and row["response"].endswith("xthe end")
    assert f"[... {len(text) - 4096} characters ...]" in row["response"] and len(row["response"]) < 4200
    assert row["response_tokens"] == len(text)


def test_every_validation_shows_the_first_prompts_of_each_set_whatever_comes_first() -> None:
    kept = FirstSamples(2)
    for arrivals in ((3, 10, 0, 11, 2, 1), (0, 1, 2, 3, 10, 11)):
        kept.begin()
        for index in (0, 1, 2, 3, 10, 11):
            kept.asked("gcd" if index < 10 else "aime", index)
        for index in arrivals:
            of, first = ("gcd", 0) if index < 10 else ("aime", 10)
            if index == 1:
                kept.add(ValidatedGroup(of, first, prompt(index), refused="too long"))
            else:
                answers = [sample(index, number) for number in (1, 0)]
                kept.add(ValidatedGroup(of, first, prompt(index), answers, [0.0, 1.0]))
        found = rows(kept.samples())
        assert [(row["set"], row["prompt"]) for row in found] == [
            ("gcd", "question 0"), ("aime", "question 10"), ("aime", "question 11"),
        ]  # fmt: skip
        assert {(row["score"], row["advantage"]) for row in found} == {(1.0, None)}, "the first response"


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_checkpoints_are_named_by_their_addresses(tmp_path: Path, kind: str) -> None:
    store: StorePath = tmp_path if kind == "disk" else UPath(f"memory:/{tmp_path}")
    root = store / "checkpoints"
    assert checkpoints(root) == {}
    for number in (4, 8, 12):
        folder = directory(root, number)
        folder.mkdir(parents=True)
        if number != 12:
            (folder / "COMMITTED").write_text("")
    keep_best(root, Best(4, "aime"))
    (store / FILE).write_text("<p>the page</p>")
    left = run_artifacts(JobFolder(store, tmp_path))
    scheme = "file:///" if kind == "disk" else "memory:/"
    assert left.page == "<p>the page</p>"
    assert all(address.startswith(scheme) for address in left.checkpoints.values())
    assert {name: address.rpartition(tmp_path.name)[2] for name, address in left.checkpoints.items()} == {
        "last_checkpoint": "/checkpoints/step-00000008",
        "best_checkpoint": "/checkpoints/step-00000004",
    }


def test_what_cannot_be_read_costs_the_end_of_a_job_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.json").write_text("{")
    left = run_artifacts(JobFolder(tmp_path, tmp_path))
    assert left.page == "" and left.checkpoints == {}
    assert "neither the run's page nor its checkpoints" in caplog.text


@pytest.fixture
def tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a server's client is the same
    # The import of MLflow takes longer than a run, and on a busy machine than what sinks get at its end.
    monkeypatch.setattr("grpo_worker.metrics.writer._END_SECONDS", 600.0)
    return {
        "mlflow": {"trackingUri": f"file://{tmp_path}/mlruns"},
        "trackers": {"sampleRows": 3, "everySteps": 2},
    }


def test_a_run_with_a_restart_has_each_table_once_and_its_page(
    tmp_path: Path, tracking: dict[str, Any]
) -> None:
    sets = [{"name": "gcd", "data": "reasoning-gym:gcd", "prompts": 5}]
    world = World(
        tmp_path / "job", steps=6, observability=tracking, validation={"sets": sets, "everySteps": 3}
    )

    def die(update: int) -> None:
        if update == 3 and world.starts == 1:
            raise world.groups[-1].death()

    world.before_update = die
    world.run()
    assert world.board.get().phase == Phase.SUCCEEDED and world.starts == 2
    sink = Mlflow(MlflowSpec.model_validate(tracking["mlflow"]), "job", {})
    run = sink._client.get_run(sink._run)
    assert run.data.params["algorithm.samplesPerPrompt"] == str(world.spec.algorithm.samples_per_prompt)
    assert run.data.params["layout.trainerGpus"] == str(world.spec.trainer.world)
    assert run.data.tags["grpo.last_checkpoint"].endswith(f"/job/checkpoints/step-{6:08d}.attempt-2")

    def tables(name: str) -> dict[str, list[dict[str, Any]]]:
        files = [file.path for file in sink._client.list_artifacts(sink._run, name)]
        read = [
            json.loads(Path(sink._client.download_artifacts(sink._run, file)).read_text()) for file in files
        ]
        return {
            file.rpartition("/")[2]: [dict(zip(one["columns"], row, strict=True)) for row in one["data"]]
            for file, one in zip(files, read, strict=True)
        }

    of_steps, validated = tables("samples"), tables("validation_samples")
    assert list(of_steps) == ["00000002.json", "00000004.json", "00000006.json"]
    assert all(len(rows) == 3 and rows[0]["score"] >= rows[2]["score"] for rows in of_steps.values())
    assert list(validated) == ["00000000.json", "00000003.json", "00000006.json"]
    assert len({tuple(row["prompt"] for row in rows) for rows in validated.values()}) == 1
    page = Path(sink._client.download_artifacts(sink._run, "run.html")).read_text()
    assert page == (tmp_path / "job" / FILE).read_text()


def test_a_failed_job_is_failed_in_its_trackers_and_has_its_page(
    tmp_path: Path, tracking: dict[str, Any]
) -> None:
    world = World(tmp_path / "job", steps=6, observability=tracking, restartPolicy={"maxRestarts": 0})

    def fail(update: int) -> None:
        raise RuntimeError("the loss is strange")

    world.before_update = fail
    world.run()
    assert world.board.get().phase == Phase.FAILED
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking["mlflow"]["trackingUri"])
    experiment = client.get_experiment_by_name("grpo")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"
    assert "the loss is strange" in Path(client.download_artifacts(run.info.run_id, FILE)).read_text()
