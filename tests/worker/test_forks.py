"""Jobs that start from another job's checkpoint, with real ranks and the copy that a controller makes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_worker.checkpointing import attempts
from grpo_worker.checkpointing.fork import Fork
from support.objects import job, spec_of
from support.ranks.launcher import run as run_on_ranks

TP2_EP2 = {"tensor": 2, "expert": 2, "expert_tensor": 1}
OTHERS: dict[str, tuple[int, dict[str, int]]] = {
    "tp2": (2, {"tensor": 2, "expert_tensor": 2}),
    "dp2": (2, {}),
    "pp2": (2, {"pipeline": 2, "layers_in_first_stage": 1}),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder of a job of one rank, and what its rank had at the checkpoint and after it."""
    folder = tmp_path_factory.mktemp("source")
    return folder, run_on_ranks("fork_cases:source", 1, root=str(folder / "checkpoints"), layout={})[0]


def _adopted(folder: Path, own: Path, **resume_from: Any) -> str:
    """Return the folder of the fork's checkpoints, with the one that its controller has taken over."""
    checkpoint = {"store": {"path": "/x"}, "resumeFrom": {"job": "source"} | resume_from}
    wanted = Fork(spec_of(job(checkpoint=checkpoint)), folder)
    assert attempts.claim(own, 1, "controller")
    assert wanted.adopt(own / "checkpoints", "tiny", 1) is not None
    return str(own / "checkpoints")


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def test_a_fork_of_the_same_job_takes_bitwise_the_same_steps(tmp_path: Path) -> None:
    folder, own = tmp_path / "source", tmp_path / "fork"
    sources = run_on_ranks("fork_cases:source", 2, root=str(folder / "checkpoints"), layout=TP2_EP2)
    root = _adopted(folder, own)
    shutil.rmtree(folder)  # the copy outlives it
    for found, expected in zip(
        run_on_ranks("fork_cases:fork", 2, root=root, layout=TP2_EP2), sources, strict=True
    ):
        assert found["history"] == expected["history"]
        assert _equal(found["weights"], expected["weights"]) and _equal(found["after"], expected["after"])


@pytest.mark.parametrize("name", OTHERS)
def test_a_fork_with_another_layout_and_rate_starts_with_the_same_weights(
    name: str, one: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    world, layout = OTHERS[name]
    root = _adopted(one[0], tmp_path, step=2)
    for found in run_on_ranks("fork_cases:fork", world, root=root, layout=layout, lr=3e-4):
        assert _equal(found["weights"], one[1]["weights"])
        (first, _), (expected, _) = found["history"], one[1]["history"]
        assert first["actor/lr"] == 3e-4 != expected["actor/lr"]
        assert first["actor/loss"] == pytest.approx(expected["actor/loss"], rel=1e-5, abs=1e-6)
        assert first["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
        assert not _equal(found["after"], one[1]["after"])


def test_a_fork_with_the_weights_alone_has_a_fresh_optimizer(
    one: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    root = _adopted(one[0], tmp_path, load="weights")
    (found,) = run_on_ranks("fork_cases:fork", 1, root=root, layout={})
    assert _equal(found["weights"], one[1]["weights"])
    first, expected = found["history"][0], one[1]["history"][0]
    assert first["actor/grad_norm"] == expected["actor/grad_norm"], "the same weights and the same batch"
    assert not _equal(found["after"], one[1]["after"]), "without the moments the steps are others"


def test_rates_and_lengths_of_a_schedule_are_those_of_the_job_that_goes_on() -> None:
    linear = {"lr": 1e-3, "lr_decay_style": "linear", "weight_decay": 0.1}

    def rates(saved: dict[str, Any], loaded: dict[str, Any]) -> dict[str, float]:
        found: dict[str, float] = run_on_ranks("fork_cases:rates", 1, saved=saved, loaded=loaded, steps=10)[0]
        return found

    raised = rates(linear | {"total": 10}, linear | {"total": 40})
    assert raised == pytest.approx({"lr": 7.5e-4, "weight_decay": 0.1, "steps": 10})
    other = rates(linear | {"total": 10}, {"lr": 2e-4, "weight_decay": 0.0, "total": 40})
    assert other == pytest.approx({"lr": 2e-4, "weight_decay": 0.0, "steps": 10})
