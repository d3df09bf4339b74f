"""Trainer layouts for weight updates, and SGLang's own load of the same weights."""

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
    """Copy a published version under another number."""
    shutil.copytree(root / f"v{old}", root / f"v{new}")
    rewrite(root / f"v{new}", new)


def rewrite(folder: Path, version: int) -> None:
    """Rewrite the manifests of a folder to ``version``."""
    for file in folder.glob("*.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"version": version}))


def from_disk(server: Server, folder: Path) -> None:
    """Load an exported checkpoint through SGLang's own route."""
    call = "/update_weights_from_disk"
    answer = server.admin(call, model_path=str(folder), load_format="safetensors").json()
    assert answer["success"], answer
