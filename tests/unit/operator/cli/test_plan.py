"""grpo-plan prints units that suit a job's size, and no GPUs for a job on CPUs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.paths import REPO
from grpo_operator.cli.plan import main
from grpo_operator.cli.units import binary_size, count, duration, size

TINY = REPO / "manifests" / "tiny-moe.yaml"
SMALL = REPO / "manifests" / "gpu" / "deepseek-v3-1b-1gpu.yaml"
_NOTHING = re.compile(r"\b0(\.0+)? (TB|GB|MB|M tokens|GPU-hours)")


def _printed(capsys: pytest.CaptureFixture[str], file: Path, *options: str, code: int = 0) -> str:
    assert main([str(file), *options]) == code
    return capsys.readouterr().out


def test_a_job_on_cpus_has_ranks_and_no_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    table = _printed(capsys, TINY)
    assert "training pool   2 nodes, 2 CPU ranks" in table
    assert "rollout pool    2 engines on 2 nodes, 2 CPU ranks" in table
    assert "MB per rank" in table
    assert "GPU" not in table and "h100" not in table and "usable" not in table
    (plan,) = json.loads(_printed(capsys, TINY, "--json"))
    for pool in plan["pools"].values():
        assert (pool["device"], pool["ranks"]) == ("cpu", 2) and "gpus" not in pool
    assert "usable_per_gpu" not in plan and "lower_bound_seconds" not in plan["sync"]


@pytest.mark.parametrize("file", [TINY, SMALL], ids=lambda file: str(file.stem))
def test_no_amount_is_rounded_to_nothing(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert not _NOTHING.search(_printed(capsys, file))


def test_a_small_job_on_a_gpu_has_gigabytes(capsys: pytest.CaptureFixture[str]) -> None:
    table = _printed(capsys, SMALL)
    assert "training pool   1 node, 1 x h100-80gb" in table and "GB per GPU" in table
    assert "weight sync     2.37 GB per version" in table


def _changed(tmp_path: Path, section: str, field: str, text: str) -> Path:
    """Write the tiny job with a field as it is written in YAML."""
    body: dict[str, Any] = yaml.safe_load(TINY.read_text())
    body["spec"].setdefault(section, {})[field] = "REPLACED"
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(body).replace("REPLACED", text))
    return file


@pytest.mark.parametrize(
    ("section", "field", "text", "message"),
    [
        (
            "trainer",
            "nodes",
            '"2"',
            "spec.trainer.nodes: must be an integer, not a text: write 2 without quotes",
        ),
        ("trainer", "optimizer", '{lr: "1e-6"}', "spec.trainer.optimizer.lr: must be a number, not a text: "),
        ("algorithm", "useKlLoss", '"true"', "spec.algorithm.useKlLoss: must be true or false, not a text: "),
        ("algorithm", "stopTokenIds", '[1, "2"]', "spec.algorithm.stopTokenIds.1: must be an integer"),
    ],
)
def test_a_text_is_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, field: str, text: str, message: str
) -> None:
    assert message in _printed(capsys, _changed(tmp_path, section, field, text), code=1)


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "0.000001"])
def test_a_learning_rate_is_a_number_however_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert "GRPOJob tiny-moe" in _printed(
        capsys, _changed(tmp_path, "trainer", "optimizer", f"{{lr: {text}}}")
    )


def test_amounts_have_the_unit_of_their_size() -> None:
    sizes = [0, 999, 429_408, 3_435_264, 16.6e9, 673e9, 5.8e12]
    assert [size(each) for each in sizes] == [
        "0 bytes", "999 bytes", "429 kB", "3.44 MB", "16.6 GB", "673 GB", "5.80 TB"
    ]  # fmt: skip
    gibibyte = 2**30
    assert [binary_size(each * gibibyte) for each in (0, 0.5, 4.4, 508)] == [
        "0 GiB", "512 MiB", "4.4 GiB", "508 GiB"
    ]  # fmt: skip
    assert [duration(each) for each in (0, 1e-5, 0.047, 2.2, 63)] == [
        "0 s", "less than 1 ms", "0.047 s", "2.2 s", "63 s"
    ]  # fmt: skip
    assert [count(each, "node") for each in (1, 2)] == ["1 node", "2 nodes"]
