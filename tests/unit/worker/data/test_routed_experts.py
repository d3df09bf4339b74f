"""Routed experts: kept in the engine's pod, read by slices over HTTP, mapped by the ranks of a pod."""

import base64
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_worker.common.auth import FILE, guarded
from grpo_worker.data.expert_folder import ExpertFolder
from grpo_worker.data.routed_experts import ExpertLayers, ExpertsError, RoutedExperts, record_of
from grpo_worker.roles.expert_store import ExpertStore, fetch, store_whole
from grpo_worker.rollout.sglang import experts_plugin
from grpo_worker.weightsync.agent.expert_routes import expert_routes
from support.engine_server import serve_app

LAYERS, TOPK = 5, 3


def whole_record(tokens: int) -> list[tuple[int, int]]:
    return [(0, tokens)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an engine's pod whose agent answers."""
    root = tmp_path / "experts"
    monkeypatch.setenv(experts_plugin.FOLDER, str(root))
    monkeypatch.setenv(experts_plugin.URL, serve_app(guarded(expert_routes(root))))
    return root


def _experts(tokens: int, count: int = 256) -> np.ndarray:
    shape = (tokens, LAYERS, TOPK)
    return np.random.default_rng(tokens).integers(0, count, shape).astype(np.int32)


def _generated(tokens: int, count: int = 256) -> RoutedExperts:
    """Return the reference in the response of an engine to a sample."""
    sent = experts_plugin.keep(torch.from_numpy(_experts(tokens, count)), count)
    meta = {"routed_experts": base64.b64encode(sent.numpy().tobytes()).decode()}
    return ExpertLayers(LAYERS, (1, 2, 4), TOPK).reference(meta, tokens)


@pytest.mark.parametrize(("count", "width"), [(256, 1), (257, 2)])
def test_experts_travel_as_small_integers_layer_by_layer(folder: Path, count: int, width: int) -> None:
    references = [_generated(tokens, count) for tokens in (1, 7, 40)]
    assert all(len(json.dumps(r.to_json())) < 250 for r in references), "all that the controller gets"
    sizes = [(folder / r.key).stat().st_size for r in references]
    assert sizes == [r.nbytes for r in references] == [LAYERS * (4 + n * TOPK * width) for n in (1, 7, 40)]
    for reference, found in fetch(references, [4, 1], whole_record):
        expected = _experts(reference.tokens, count).transpose(1, 0, 2)[[4, 1]]
        assert found is not None and found.dtype.itemsize == width and np.array_equal(found, expected)


@given(
    tokens=st.integers(1, 40),
    layers=st.lists(st.integers(0, LAYERS - 1), unique=True),
    cuts=st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)).map(
        sorted
    ),
)
def test_a_rank_reads_its_layers_and_tokens_alone(tokens: int, layers: list[int], cuts: list[int]) -> None:
    experts = _experts(tokens).astype(np.uint8).transpose(1, 0, 2)
    record, digest = record_of(experts)
    reference = RoutedExperts("http://e", "k", tokens, LAYERS, TOPK, digest)
    spans = [(cuts[0], cuts[1]), (cuts[2], cuts[3])]
    ranges = reference.ranges(layers, spans)
    data = b"".join(record[start : start + length] for start, length in ranges)
    mine = np.zeros(tokens, bool)
    for start, end in spans:
        mine[start:end] = True
    assert len(data) <= LAYERS * 4 + len(layers) * (int(mine.sum()) + 50) * TOPK
    found = reference.parse(data, layers, spans)
    assert np.array_equal(found, np.where(mine[:, None], experts[layers], 0))


def test_a_rank_reads_other_tokens_of_each_sample(folder: Path, tmp_path: Path) -> None:
    """As with packed sequences, which context parallelism cuts by their lengths."""
    references = [_generated(tokens) for tokens in (3, 40)]
    for in_file in (False, True):
        if in_file:
            file = tmp_path / "store" / "experts.bin"
            offsets = store_whole(references, file)
            references = [replace(r, location=str(file), offset=offsets[r.key]) for r in references]
        for reference, found in fetch(references, [2], lambda tokens: [(tokens // 2, tokens)]):
            expected = _experts(reference.tokens).transpose(1, 0, 2)[[2]]
            expected[:, : reference.tokens // 2] = 0
            assert found is not None and np.array_equal(found, expected)


def test_what_is_damaged_or_gone_is_lost(folder: Path, tmp_path: Path) -> None:
    whole, gone, damaged = (_generated(20) for _ in range(3))
    (folder / gone.key).unlink()
    content = bytearray((folder / damaged.key).read_bytes())
    content[-1] ^= 1
    (folder / damaged.key).write_bytes(content)
    dead = RoutedExperts("http://127.0.0.1:9", "0" * 32, 20, LAYERS, TOPK, 1)
    store = ExpertStore(tmp_path / "pod" / "dp0.bin")
    lost = store.fetch([whole, gone, damaged, dead], [0, 4], whole_record)
    assert sorted(lost) == sorted([gone.key, damaged.key, dead.key])
    store.map()
    assert set(store.rows) == {whole.key}


def test_ranks_of_a_pod_map_what_one_of_them_fetched(folder: Path, tmp_path: Path) -> None:
    references = [_generated(tokens) for tokens in (3, 9)]
    file = tmp_path / "pod" / "dp0-pp0-cp0.bin"
    assert ExpertStore(file).fetch(references, [1, 3], whole_record) == []
    ExpertFolder(folder).drop([r.key for r in references])  # the engine's pod may go now
    other = ExpertStore(file)
    other.map()
    for reference in references:
        expected = _experts(reference.tokens).transpose(1, 0, 2)[[1, 3]]
        assert np.array_equal(other.rows[reference.key], expected)
        assert not other.rows[reference.key].flags.owndata
    before = other.rows[references[0].key]
    ExpertStore(file).fetch([], [1, 3], whole_record)  # the next step
    assert np.array_equal(before, _experts(3).transpose(1, 0, 2)[[1, 3]]), "what is mapped stays"


def test_stored_experts_outlive_the_engine(folder: Path, tmp_path: Path) -> None:
    references = [_generated(tokens) for tokens in (40, 3, 9)]
    (folder / references[1].key).unlink()
    offsets = store_whole(references, tmp_path / "step" / "rank-0.bin")
    assert set(offsets) == {references[0].key, references[2].key}
    shutil.rmtree(folder)
    stored = [
        RoutedExperts(
            **r.to_json() | {"location": str(tmp_path / "step" / "rank-0.bin"), "offset": offsets[r.key]}
        )
        for r in (references[2], references[0])
    ]
    for reference, found in fetch(stored, [0, 2], whole_record):
        assert reference.in_file and found is not None
        assert np.array_equal(found, _experts(reference.tokens).transpose(1, 0, 2)[[0, 2]])


def test_a_full_volume_forgets_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, size = tmp_path / "experts", 1000

    def usage(_path: Any) -> Any:
        used = sum(file.stat().st_size for file in root.iterdir())
        return shutil._ntuple_diskusage(size, used, size - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    folder = ExpertFolder(root)
    keys = [f"{number:032x}" for number in range(6)]
    for number, key in enumerate(keys):
        folder.write(key, bytes(300))
        os.utime(root / key, (number, number))
    assert sorted(file.name for file in root.iterdir()) == keys[-3:]


def _full(_folder: ExpertFolder, _key: str, _record: bytes) -> None:
    raise OSError(28, "No space left on device")


def test_a_reference_of_another_shape_or_none_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = ExpertLayers(LAYERS, (1, 2, 4), TOPK)
    sent = experts_plugin.keep(torch.from_numpy(_experts(4)), 256)
    meta = {"routed_experts": base64.b64encode(sent.numpy().tobytes()).decode()}
    with pytest.raises(ExpertsError, match=r"shape \(4, 5, 3\), expected \(5, 5, 3\)"):
        layers.reference(meta, 5)
    with pytest.raises(ExpertsError, match=r"set engine\.returnRoutedExperts"):
        layers.reference({}, 4)
    monkeypatch.setattr(ExpertFolder, "write", _full)
    sent = experts_plugin.keep(torch.from_numpy(_experts(4)), 256)
    meta = {"routed_experts": base64.b64encode(sent.numpy().tobytes()).decode()}
    with pytest.raises(ExpertsError, match=r"No space left on device: raise engine\.routedExpertsGibibytes"):
        layers.reference(meta, 4)
    inline = base64.b64encode(_experts(4).tobytes()).decode()
    with pytest.raises(ExpertsError, match="its image lacks grpo-worker's plugin"):
        layers.reference({"routed_experts": inline}, 4)


def test_keys_are_no_paths(folder: Path) -> None:
    with pytest.raises(ValueError, match="no key of routed experts"):
        ExpertFolder(folder).drop(["../../etc/passwd"])


def test_an_agent_that_refuses_is_named_and_nothing_counts_as_lost(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = _generated(3)
    key = tmp_path / "key"
    key.write_text("of the namespace")
    monkeypatch.setenv(FILE, str(key))
    assert next(fetch([reference], [1], whole_record))[1] is not None, "with the key"
    monkeypatch.setattr("grpo_worker.roles.expert_store.pair_headers", dict)
    with pytest.raises(ExpertsError, match="refuses to send routed experts: HTTP 401"):
        list(fetch([reference], [1], whole_record))
