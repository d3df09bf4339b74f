"""The loop with rewards that have parts: the training is the same, also after a restart."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.common.reward_parts import Reward
from grpo_worker.rollout.sampling import Sample
from grpo_worker.samples.files import sample_steps
from grpo_worker.samples.reader import samples
from support.gang_deaths import die_once
from support.loop_world import Engines, World

VALIDATION = {"sets": [{"name": "gcd", "data": "reasoning-gym:gcd", "prompts": 5}], "everySteps": 3}


class _Parted(Engines):
    """Engines whose responses are judged by a function with two parts."""

    def score(self, samples: list[Sample]) -> list[float]:
        scores = super().score(samples)
        return [
            Reward(score, {"odd": score, "length": float(len(sample.ids))})
            for sample, score in zip(samples, scores, strict=True)
        ]


def _world(folder: Path, parted: bool = True) -> World:
    world = World(folder, validation=VALIDATION, staleness={"maxVersionLag": 1})
    if parted:
        world.engines = _Parted(world)
    # These steps take no time, and a step whose samples would have to wait for those before is not written.
    world.before_update = lambda _updates: world.loop.files.samples.flush()
    return world


def _rows(folder: Path, validation: bool = False) -> list[dict[str, Any]]:
    """Return the samples of all steps, without what differs between attempts."""
    steps = sample_steps(folder / ("validation_samples" if validation else "samples"))
    rows = [row for step in steps for row in samples(folder, step, validation=validation)]
    return [{k: v for k, v in row.items() if k not in ("attempt", "time")} for row in rows]


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calm")
    world = _world(folder)
    world.run()
    assert world.board.get().phase == Phase.SUCCEEDED
    return folder


def test_parts_change_nothing_that_is_trained_on_or_recorded_in_the_ledger(
    tmp_path: Path, calm: Path
) -> None:
    ledger = _world(tmp_path, parted=False).run()
    assert (calm / "ledger.jsonl").read_bytes() == (tmp_path / "ledger.jsonl").read_bytes() and ledger
    for name in ("actor/loss", "critic/score/mean"):
        assert [one[name] for one in _records(calm)] == [one[name] for one in _records(tmp_path)]
    assert not [name for one in _records(tmp_path) for name in one if name.startswith("reward/odd")]
    for validation in (False, True):
        plain = [row | {"reward_parts": None} for row in _rows(calm, validation)]
        assert plain == _rows(tmp_path, validation)


def test_samples_validations_and_metrics_have_the_parts(calm: Path) -> None:
    rows, records = _rows(calm), _records(calm)
    for row in (*rows, *_rows(calm, validation=True)):
        length = float(len(row["answer_ids"]))
        assert row["reward_parts"] == {"odd": row["score"], "length": length}
    for record in records:
        own = [row["reward_parts"] for row in rows if row["step"] == record["step"]]
        for name in ("odd", "length"):
            mean = sum(parts[name] for parts in own) / len(own)
            assert record[f"reward/{name}/mean"] == pytest.approx(mean) and own


def test_a_restart_keeps_the_parts_of_samples_that_were_generated_ahead(tmp_path: Path, calm: Path) -> None:
    world = _world(tmp_path)
    died = die_once(world, 5, before=lambda: world.loop.files.samples.flush())
    world.run()
    assert died and world.starts == 2
    assert _rows(tmp_path) == _rows(calm)
    names = ("step", "reward/odd/mean", "reward/length/mean")
    assert [[one[name] for name in names] for one in _records(tmp_path)] == [
        [one[name] for name in names] for one in _records(calm)
    ]
