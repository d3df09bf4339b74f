"""Every manifest and every YAML block of the documentation is accepted by a real API server."""

import re
from pathlib import Path

import pytest
import yaml
from support.api_server import Api

from grpo_devcluster.paths import REPO
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec

PAGES = sorted([REPO / "README.md", *(REPO / "docs").glob("*.md")])
BLOCK = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPECS = {"GRPOJob": GRPOJobSpec, "RolloutPool": RolloutPoolSpec}


def blocks() -> list[tuple[Path, str]]:
    return [(page, block) for page in PAGES for block in BLOCK.findall(page.read_text())]


def test_there_are_blocks() -> None:
    assert len(blocks()) >= 3


@pytest.mark.parametrize("block", [text for _, text in blocks()])
def test_a_block_is_accepted(api: Api, block: str) -> None:
    api.ok("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=block)
    for document in yaml.safe_load_all(block):
        SPECS[document["kind"]].model_validate(document["spec"])
