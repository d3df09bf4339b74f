"""Exports of ranks to real servers of objects: what is there, and when it counts as complete."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.checkpointing import attempts
from grpo_worker.checkpointing.exports import EXPORTS, complete_exports
from grpo_worker.common.store_path import uploads_below
from support.google_store import google_server
from support.object_store import ObjectServer, s3_server
from support.ranks.launcher import run as run_on_ranks
from support.store_proxy import faulty

TP2_EP2 = {"tensor": 2, "expert": 2, "expert_tensor": 1}
STEP = "step-00000001"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[s3_server, google_server], ids=["s3", "gs"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ObjectServer]:
    with request.param(tmp_path_factory.mktemp("store")) as server:
        yield server


def _export(server: ObjectServer, store: StoreSpec, folder: str, attempt: int) -> list[str]:
    """Export by two ranks with the server's keys; return the error of each."""
    return run_on_ranks(
        "object_cases:export_weights", 2, store=store.wire(), folder=folder, layout=TP2_EP2,
        keys=server.keys, attempt=attempt,
    )  # fmt: skip


def _tensors(export: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in export.glob("*.safetensors") for name, value in load_file(file).items()}


def test_an_export_in_a_bucket_has_the_files_of_one_in_a_directory_despite_faults(
    server: ObjectServer, tmp_path: Path
) -> None:
    ways: dict[int, int | str] = {3: 503, 5: 500, 8: "cut"}
    cut_parts: list[str] = []

    def choose(request: web.Request, number: int) -> int | str | None:
        if server.is_part(request) and not cut_parts:
            cut_parts.append(server.key(request))
            return "cut"
        return ways.get(number % 11)

    assert _export(server, StoreSpec(path=str(tmp_path)), "plain", 1) == ["", ""]
    with faulty(server, choose) as proxy:
        assert _export(server, server.spec(proxy.port), "bucket", 1) == ["", ""]
        assert cut_parts and min(proxy.fired[kind] for kind in ("503", "500", "cut")) >= 1, proxy.fired
    plain, found = tmp_path / "plain" / EXPORTS / STEP, server.files / "jobs" / "bucket" / EXPORTS / STEP
    expected, tensors = _tensors(plain), _tensors(found)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    names = {file.name for file in plain.iterdir()}
    assert {name.replace("model-1-", "model-") for name in _names(found)} == names
    assert complete_exports(server.folder("bucket") / EXPORTS) == {1}
    assert not uploads_below(server.folder("bucket"))
    model = AutoModelForCausalLM.from_pretrained(found)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == sum(v.numel() for name, v in expected.items() if not name.endswith("bias"))


def _names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_what_an_attempt_did_not_complete_is_replaced(server: ObjectServer) -> None:
    exports = server.folder("replaced") / EXPORTS
    for name in ("model-1-00000-00000.safetensors", "model.safetensors.index.json"):
        (exports / STEP / name).write_bytes(b"of attempt 1")
    assert complete_exports(exports) == set()
    assert _export(server, server.spec(), "replaced", 2) == ["", ""]
    assert complete_exports(exports) == {1}
    names = _names(server.files / "jobs" / "replaced" / EXPORTS / STEP)
    assert not any(name.startswith("model-1-") for name in names), names


def test_an_older_attempt_completes_no_export(server: ObjectServer) -> None:
    assert attempts.claim(server.folder("superseded"), 2, "another controller")
    errors = _export(server, server.spec(), "superseded", 1)
    assert all("attempt 2 has begun in another controller" in error for error in errors), errors
    assert complete_exports(server.folder("superseded") / EXPORTS) == set()
