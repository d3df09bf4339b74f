"""Exports of checkpoints by the program: the same bits as the ranks' own, and what it refuses."""

import errno
import gc
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.checkpointing.exports import EXPORTS, complete_exports
from grpo_worker.checkpointing.restart_point import CHECKPOINTS
from grpo_worker.checkpointing.store import MARKER, DamagedCheckpointError
from grpo_worker.common.store_path import remove_tree
from grpo_worker.common.store_problems import UnwritableStoreError
from grpo_worker.megatron.export import files, offline, place, stored_checkpoint
from grpo_worker.megatron.export.config import Quantization
from grpo_worker.megatron.export.offline import export
from grpo_worker.megatron.export.order import ExportOrder
from grpo_worker.model_files.names import INDEX, TINY_TOKENIZER
from support.object_store import s3_server
from support.ranks.launcher import run as run_on_ranks
from support.tiny_models import tiny_model

FOLDER = "default-tiny-0123abcd"
FORMATS: tuple[Quantization, ...] = ("none", "fp8-block128")
ODD = {"hidden_size": 192, "intermediate_size": 320, "moe_intermediate_size": 160}  # cut through FP8 blocks
MODELS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "deepseek-mtp-ep2": (tiny_model("deepseek_v3") | ODD | {"num_nextn_predict_layers": 1}, {"expert": 2}),
    "qwen3-tied-tp2": (tiny_model("qwen3-tied") | ODD, {"tensor": 2, "expert_tensor": 2}),
}
PROGRAM = """
import sys
from grpo_worker.megatron.export.offline import main
assert not any(name.startswith("megatron.core") for name in sys.modules), "it may not load without a GPU"
for argument in sys.argv[1:]:
    main([argument])
"""


@dataclass(frozen=True)
class Job:
    """A job with checkpoints of steps 1 and 2, and the ranks' exports of step 1 in each of ``FORMATS``."""

    store: StoreSpec
    folder: Path
    model: Path

    def request(self, **changes: Any) -> ExportOrder:
        fields = {"folder": str(self.folder), "store": self.store.wire(), "model": {"path": str(self.model)}}
        return ExportOrder.parse(json.dumps(fields | {"step": 1, "name": "mine"} | changes))

    def copy(self, to: Path) -> "Job":
        return Job(self.store, Path(shutil.copytree(self.folder, to / FOLDER)), self.model)


def _job(root: Path, name: str, store: StoreSpec | None = None, folder: Path | None = None) -> Job:
    hf, layout = MODELS[name]
    model = root / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(hf))
    (model / "tokenizer.json").write_bytes(TINY_TOKENIZER.read_bytes())
    (model / "chat_template.jinja").write_text("{{ messages }}")
    job = Job(store or StoreSpec(path=str(root)), folder or root / FOLDER, model)
    run_on_ranks(
        "offline_cases:save", 2, store=job.store.wire(), folder=str(job.folder), model=str(model),
        layout=layout, mtp="mtp" in name, formats=FORMATS,
    )  # fmt: skip
    return job


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Job]:
    return cache(lambda name: _job(tmp_path_factory.mktemp("job"), name))


@pytest.fixture
def dense(jobs: Callable[[str], Job]) -> Job:
    return jobs("qwen3-tied-tp2")


@pytest.mark.parametrize("number", range(len(FORMATS)), ids=FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_it_has_the_bits_of_an_export_of_the_ranks(
    name: str, number: int, jobs: Callable[[str], Job]
) -> None:
    job = jobs(name)
    export(job.request(quantization=FORMATS[number], name=f"format-{number}"))
    _is_the_same(
        job.folder / EXPORTS / f"format-{number}", job.folder / EXPORTS / f"step-0000000{number + 1}"
    )


def _is_the_same(found: Path, expected: Path) -> None:
    ours, theirs = _tensors(found), _tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name
    index, other = (json.loads((folder / INDEX).read_text()) for folder in (found, expected))
    assert index["metadata"] == other["metadata"] and index["weight_map"].keys() == ours.keys()
    assert _small(found) == _small(expected)
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= _small(found).keys()


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def _small(folder: Path) -> dict[str, bytes]:
    return {
        f.name: f.read_bytes() for f in folder.iterdir() if f.suffix != ".safetensors" and f.name != INDEX
    }


def test_the_program_needs_no_gpu_and_names_what_is_in_the_way(dense: Job) -> None:
    good = dense.request(name="by-program", step=2)
    wrong = dense.request(name="never", step=7)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(good.wire()), json.dumps(wrong.wire())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    expected = (
        "step 7 is not exported as never: .*checkpoints has no complete checkpoint of step 7: there are"
    )
    assert re.search(f"{expected} those of steps 1, 2$", last), result.stderr
    assert "Traceback" not in result.stderr
    first, second = dense.folder / EXPORTS / "step-00000001", dense.folder / EXPORTS / "by-program"
    one, two = _tensors(first), _tensors(second)
    assert one.keys() == two.keys() and any(not torch.equal(one[name], two[name]) for name in one)


def test_it_holds_one_file_and_a_few_tensors(
    dense: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, peak, before = 200_000, 0, _held()
    monkeypatch.setattr(files, "FILE_BYTES", limit)
    monkeypatch.setattr(stored_checkpoint, "BATCH_BYTES", 1)

    def measured(tensors: dict[str, torch.Tensor], *more: Any, **kwargs: Any) -> None:
        nonlocal peak
        peak = max(peak, _held() - before)
        save_file(tensors, *more, **kwargs)

    monkeypatch.setattr(place, "save_file", measured)
    copy = dense.copy(tmp_path)
    export(copy.request())
    tensors = _tensors(copy.folder / EXPORTS / "mine").values()
    largest = max(tensor.nbytes for tensor in tensors)
    # A file, a tensor of the checkpoint, which may be gate and up projection, and the part that does not fit.
    assert limit / 2 < peak <= limit + 3 * largest, (peak, largest)
    assert sum(tensor.nbytes for tensor in tensors) > 1.5 * (limit + 3 * largest), "the model is larger"


def _held() -> int:
    """Return the bytes of all tensors of this process."""
    storages = [o.untyped_storage() for o in gc.get_objects() if type(o) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_a_damaged_checkpoint_is_named_and_nothing_is_left(dense: Job, tmp_path: Path) -> None:
    copy = dense.copy(tmp_path)
    before = {path.name for path in (copy.folder / EXPORTS).iterdir()}
    folder = next((copy.folder / CHECKPOINTS).glob("step-00000001*"))
    _change_a_bit(folder, "decoder.final_layernorm.weight")
    with pytest.raises(DamagedCheckpointError, match="distcp was changed after the save, between bytes"):
        export(copy.request())
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpointError, match=r"distcp is missing or not \d+ bytes long"):
        export(copy.request())
    (folder / MARKER).unlink()
    with pytest.raises(ValueError, match="no complete checkpoint of step 1: there are those of steps 2"):
        export(copy.request())
    assert {path.name for path in (copy.folder / EXPORTS).iterdir()} == before


def _change_a_bit(checkpoint: Path, key: str) -> None:
    places = FileSystemReader(checkpoint).read_metadata().storage_data
    info = next(info for index, info in places.items() if index.fqn == key)
    with (checkpoint / info.relative_path).open("r+b") as file:
        file.seek(info.offset + info.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))


def test_a_checkpoint_that_the_job_removes_meanwhile_is_named(
    dense: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = dense.copy(tmp_path)
    folder = next((copy.folder / CHECKPOINTS).glob("step-00000001*"))
    monkeypatch.setattr(stored_checkpoint, "BATCH_BYTES", 1)

    def removed(*arguments: Any) -> dict[str, torch.Tensor]:
        remove_tree(folder)
        return files.stored(*arguments)

    monkeypatch.setattr(offline, "stored", removed)
    with pytest.raises(ValueError, match=r"has removed .*step-00000001.* meanwhile: export a newer"):
        export(copy.request())
    assert complete_exports(copy.folder / EXPORTS) == {1, 2}


def test_an_export_is_not_replaced_and_a_full_store_is_named(
    dense: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = dense.copy(tmp_path)
    export(copy.request())
    with pytest.raises(FileExistsError, match="export/mine is a complete export: choose another name"):
        export(copy.request(step=2))
    _is_the_same(copy.folder / EXPORTS / "mine", copy.folder / EXPORTS / "step-00000001")

    def full(*_arguments: Any, **_more: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(place, "save_file", full)
    with pytest.raises(
        UnwritableStoreError, match=r"cannot write model-.*No space left.*free or add"
    ) as raised:
        export(copy.request(name="second"))
    assert raised.value.errno == errno.ENOSPC
    assert not list((copy.folder / EXPORTS).glob("second*"))


@pytest.mark.slow
def test_a_checkpoint_in_a_bucket_is_exported_there(tmp_path: Path) -> None:
    with s3_server(tmp_path / "s3") as server:
        folder = Path("/store", FOLDER)
        job = _job(tmp_path, "deepseek-mtp-ep2", server.spec(), folder)
        export(job.request())
        exports = server.files / "jobs" / FOLDER / EXPORTS
        _is_the_same(exports / "mine", exports / "step-00000001")
        with pytest.raises(FileExistsError, match="mine is a complete export"):
            export(job.request())
