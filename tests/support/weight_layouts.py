"""Trainer layouts of which weights are sent, and the engine's own way to the same weights."""

import json
import shutil
from pathlib import Path

from support.engine_server import Server

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "TP2 EP2": (2, {"tensor": 2, "expert": 2, "expert_tensor": 1}),
    "TP2 EP2 PP2": (
        4,
        {"tensor": 2, "expert": 2, "expert_tensor": 1, "pipeline": 2, "layers_in_first_stage": 1},
    ),
    "EP4": (4, {"expert": 4, "expert_tensor": 1}),
}


def copy_version(root: Path, old: int, new: int) -> None:
    """The weights of a published version as another one."""
    shutil.copytree(root / f"v{old}", root / f"v{new}")
    rewrite(root / f"v{new}", new)


def rewrite(folder: Path, version: int) -> None:
    """Say that a folder's blobs are of ``version``."""
    for file in folder.glob("*.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"version": version}))


def from_disk(server: Server, folder: Path) -> None:
    """Load an exported checkpoint by SGLang's own route."""
    call = "/update_weights_from_disk"
    answer = server.admin(call, model_path=str(folder), load_format="safetensors").json()
    assert answer["success"], answer
