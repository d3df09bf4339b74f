"""The gallery names the algorithm and counts the GPUs of a manifest."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.paths import REPO
from grpo_devcluster.reference.examples import examples_page
from grpo_operator.plan.planner.resolve import RefusedError

NAMES: dict[str, dict[str, Any]] = {
    "GRPO x 16": {},
    "Dr.GRPO x 8": {"normAdvByStd": False, "samplesPerPrompt": 8},
    "DAPO x 16": {"filterGroups": {}},
    "GSPO x 16": {"policyLoss": "gspo"},
    "RLOO x 16": {"advEstimator": "rloo"},
}


def _page(folder: Path, *others: dict[str, Any], **changes: Any) -> str:
    body = yaml.safe_load((REPO / "manifests/gpu/deepseek-v3-1b-4gpu.yaml").read_text())
    body["spec"] |= changes
    text = "# Shows a thing. Plan it: grpo-plan x.yaml\n#\n# More.\n" + yaml.safe_dump_all([*others, body])
    (folder / "x.yaml").write_text(text)
    return examples_page(folder)


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_has_its_usual_name(name: str, tmp_path: Path) -> None:
    page = _page(tmp_path, algorithm=NAMES[name])
    row = f"| 2 + 2 x h100-80gb | preset:deepseek-v3-1b, {name}, `reasoning-gym:gcd` | Shows a thing. |\n"
    assert f"| [x](../../manifests/x.yaml) {row}" in page


def test_engines_of_a_shared_pool_are_counted(tmp_path: Path) -> None:
    pool = {"replicas": 3, "model": {"path": "preset:deepseek-v3-1b"}, "engine": {"contextLength": 256}}
    shared = {"kind": "RolloutPool", "metadata": {"name": "shared"}, "spec": pool}
    page = _page(tmp_path, shared, rollout={"poolRef": {"name": "shared"}})
    assert "| 2 + 3 of a pool x h100-80gb | preset:deepseek-v3-1b, GRPO x 16," in page


def test_a_pool_that_the_file_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        RefusedError, match=r"poolRef\.name=shared: the manifest contains no such RolloutPool"
    ):
        _page(tmp_path, rollout={"poolRef": {"name": "shared"}})
