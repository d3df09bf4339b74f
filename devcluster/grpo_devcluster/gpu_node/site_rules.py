"""Pins of ``make gpu-node-site``, and rules for what its folder leaves out.

Needs nothing but Python's standard library, because ``make gpu-node-pack`` looks here for the folder.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_devcluster.paths import CACHE, REPO, content_key, tree_key
from grpo_devcluster.stages import StageError

_HERE = Path(__file__).parent
PINS = REPO / "devcluster" / "gpu-node-site.txt"
RULES = REPO / "devcluster" / "gpu-node-site.toml"
STUBS = _HERE / "stubs"
_RECIPE = (PINS, RULES, STUBS, *(_HERE / name for name in ("site.py", "site_trim.py", "fatbin.py")))
_PIN = re.compile(r"([\w.-]+)==(\S+) --hash=(sha256:[0-9a-f]{64})(?: +# (.+))?")


@dataclass(frozen=True, slots=True)
class Pin:
    """A line of the pins. ``reason``: why its version is not uv.lock's, else ""."""

    name: str
    version: str
    hash: str
    reason: str


@dataclass(frozen=True, slots=True)
class OwnWheel:
    """A package that no index has for the machine's torch.

    ``without``: what happens without it. ``serves``: pinned packages that are of no use then.
    """

    name: str
    version: str
    without: str
    serves: tuple[str, ...]

    @property
    def pattern(self) -> str:
        """Return the pattern of its file's name for the machine's Python."""
        return f"{self.name.replace('-', '_')}-{self.version}-cp312-*.whl"


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules file.

    ``machine``: requirements that the machine's environment meets. ``left_out``: package -> why nobody misses
    it. ``other_versions``: package -> why its version need not be the project's. ``dropped``: patterns of
    files. ``unstripped``: patterns of libraries that keep their symbols. ``pruned``: libraries with GPU code
    of many architectures. ``architecture``: the one that is kept, as 90 for compute capability 9.0.
    """

    machine: tuple[str, ...]
    left_out: dict[str, str]
    other_versions: dict[str, str]
    dropped: tuple[str, ...]
    unstripped: tuple[str, ...]
    pruned: tuple[str, ...]
    architecture: int
    own_wheels: tuple[OwnWheel, ...]


def read_pins(text: str) -> list[Pin]:
    """Return the pins of a requirements file. Raises StageError at a line of another form."""
    pins = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = _PIN.fullmatch(line)
        if match is None:
            raise StageError(f"{PINS.name}: {line!r} is not NAME==VERSION --hash=sha256:DIGEST [# REASON]")
        name, version, digest, reason = match.groups(default="")
        pins.append(Pin(name, version, digest, reason))
    return pins


def read_rules(text: str) -> Rules:
    """Return the rules of a rules file."""
    data: dict[str, Any] = tomllib.loads(text)
    return Rules(
        tuple(data["machine"]["packages"]),
        {package: rule["why"] for rule in data["left_out"] for package in rule["packages"]},
        dict(data["other_versions"]),
        tuple(pattern for rule in data["dropped"] for pattern in rule["files"]),
        tuple(data["libraries"]["unstripped"]),
        tuple(data["libraries"]["pruned"]),
        int(data["libraries"]["architecture"]),
        tuple(
            OwnWheel(wheel["name"], wheel["version"], wheel["without"], tuple(wheel["serves"]))
            for wheel in data["own_wheels"]
        ),
    )


def own_wheels(rules: Rules, folder: str | None) -> dict[str, Path]:
    """Return the wheels of GRPO_GPU_NODE_WHEELS by package. Raises StageError if there is no such folder."""
    if not folder:
        return {}
    if not Path(folder).is_dir():
        raise StageError(f"GRPO_GPU_NODE_WHEELS={folder} is not a folder: name one of wheels, or unset it.")
    found = {wheel.name: sorted(Path(folder).glob(wheel.pattern)) for wheel in rules.own_wheels}
    return {name: paths[-1] for name, paths in found.items() if paths}


def folder_for(wheels: Mapping[str, Path]) -> Path:
    """Return the folder in the cache of the pins, the rules and these wheels."""
    contents = [part for name, path in sorted(wheels.items()) for part in (name.encode(), path.read_bytes())]
    return _homes() / f"{tree_key(*_RECIPE)}-{content_key(*contents)}"


def made_folder() -> Path | None:
    """Return the folder of these pins and rules that ``make gpu-node-site`` has made last, if any."""
    found = [path for path in _homes().glob(f"{tree_key(*_RECIPE)}-*") if path.suffix == ""]
    return max(found, key=os.path.getmtime, default=None)


def _homes() -> Path:
    return CACHE / "gpu-node-site"
