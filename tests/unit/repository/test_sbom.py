"""The images' bills of materials: valid, complete, with licences, and the same for the same commit."""

import json
import re
from typing import Any

import pytest
from cyclonedx.validation.json import JsonStrictValidator

from grpo_devcluster.image_locks import read_bases
from grpo_devcluster.paths import REPO
from grpo_devcluster.sbom import FORMAT, bills, licences

IMAGES = tuple(read_bases())
# Everything in the operator's image may be passed on with it.
PERMISSIVE = re.compile(
    r"(Apache-2\.0|MIT-0|MIT|BSD-[23]-Clause|PSF-2\.0|Python Software Foundation License|BSD License"
    r"|MIT License|Apache Software License|Mozilla Public License 2\.0 \(MPL 2\.0\)|OR|AND| )+"
)
UNNAMED = {"zss"}  # says nothing in its metadata


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return dict(bills())


@pytest.fixture(scope="module")
def components(texts: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the components of each image by name."""
    return {
        name: {part["name"]: part for part in json.loads(text)["components"]} for name, text in texts.items()
    }


@pytest.mark.parametrize("image", IMAGES)
def test_a_bill_is_valid_and_has_no_time_of_its_own(texts: dict[str, str], image: str) -> None:
    assert JsonStrictValidator(FORMAT).validate_str(texts[image]) is None
    assert dict(bills())[image] == texts[image]


@pytest.mark.parametrize("image", IMAGES)
def test_it_lists_what_the_image_installs(components: dict[str, dict[str, Any]], image: str) -> None:
    base = read_bases()[image]
    lines = (REPO / f"images/{image}.txt").read_text().splitlines()
    pins = dict(line.split(" ")[0].split("==") for line in lines if "==" in line and line[0] not in "# ")
    found = components[image]
    assert found.pop("grpo-operator")["version"] and found.pop(base.image.rpartition(":")[0])
    assert {name: part["version"] for name, part in found.items()} == pins
    assert all(part["hashes"] for part in found.values())
    unknown = {name for name, part in found.items() if not part.get("licenses")}
    assert unknown <= UNNAMED


def test_the_operators_image_can_be_passed_on(components: dict[str, dict[str, Any]]) -> None:
    names = set(components["operator"]) - {"python"}
    refused = {name: text for name in names for text in licences(name) if not PERMISSIVE.fullmatch(text)}
    assert not refused
