"""Trainer layouts of which weights are sent, and the engine's own way to the same weights."""

from pathlib import Path

from engine_server import Server

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "TP2 EP2": (2, {"tensor": 2, "expert": 2, "expert_tensor": 1}),
    "TP2 EP2 PP2": (
        4,
        {"tensor": 2, "expert": 2, "expert_tensor": 1, "pipeline": 2, "layers_in_first_stage": 1},
    ),
    "EP4": (4, {"expert": 4, "expert_tensor": 1}),
}


def from_disk(server: Server, folder: Path) -> None:
    """Load an exported checkpoint by SGLang's own route."""
    call = "/update_weights_from_disk"
    answer = server.admin(call, model_path=str(folder), load_format="safetensors").json()
    assert answer["success"], answer
