"""A real API server accepts every YAML block of README and docs.

The files of manifests/ are those of test_admission.py.
"""

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from grpo_devcluster.paths import REPO
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from support.api_server import Api

PAGES = sorted([REPO / "README.md", *(REPO / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPECS: dict[str, type[BaseModel]] = {"GRPOJob": GRPOJobSpec, "RolloutPool": RolloutPoolSpec}


def blocks() -> list[tuple[Path, str]]:
    return [(page, block) for page in PAGES for block in BLOCK.findall(page.read_text())]


def test_there_are_blocks() -> None:
    assert len(blocks()) >= 8


@pytest.mark.parametrize(
    "block", [pytest.param(text, id=f"{page.stem}-{number}") for number, (page, text) in enumerate(blocks())]
)
def test_a_block_is_accepted(api: Api, block: str) -> None:
    api.ok("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=block)
    for document in yaml.safe_load_all(block):
        SPECS[document["kind"]].model_validate(document["spec"])
