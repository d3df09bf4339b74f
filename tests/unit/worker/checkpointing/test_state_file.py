"""The file of a state: whatever goes in comes out with the same types and bits, and nothing else is read."""

import json
import random
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from grpo_worker.checkpointing.snapshot_seal import content_digest
from grpo_worker.checkpointing.state_file import CHUNK, read_state, write_state
from grpo_worker.checkpointing.state_tree import StateError, flatten, nest

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64,
]  # fmt: skip


def _tensor(dtype: torch.dtype, shape: list[int], seed: int, turned: bool) -> torch.Tensor:
    """Return a tensor of random bits, NaNs among them. ``turned``: not contiguous."""
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8,
                         generator=torch.Generator().manual_seed(seed))  # fmt: skip
    tensor = bits.view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if turned and shape else tensor


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
TENSORS = st.builds(
    _tensor,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
    st.booleans(),
)
ARRAYS = st.builds(
    lambda dtype, size: np.arange(size).astype(dtype),
    st.sampled_from(["u4", ">i8", "f8", "?"]),
    st.integers(0, 4),
)
NUMPY_SCALARS = st.builds(np.float32, st.floats(width=32)) | st.builds(np.int64, st.integers(-9, 9))
KEYS = SCALARS | st.tuples(st.integers(), st.text())
STATES = st.recursive(
    SCALARS | TENSORS | ARRAYS | NUMPY_SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
)


def _shown(value: Any) -> Any:
    """Return a value with its types and bits, for comparison."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).tolist())
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value).astype(value.dtype.newbyteorder("="))
        return (type(value), array.dtype, array.shape, array.tobytes())
    if isinstance(value, dict):
        return ("dict", [(_shown(key), _shown(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), [_shown(item) for item in value])
    return (type(value), repr(value))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states") / "rank-0.safetensors"


@settings(deadline=None)
@given(STATES)
def test_every_state_comes_back(path: Path, state: Any) -> None:
    digest = content_digest()
    written = write_state(path, state)
    digest.update(path.read_bytes())
    assert written == digest.hexdigest()
    assert _shown(read_state(path)) == _shown(state)


def test_generators_go_on_as_before(path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    saved = {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": {"model-parallel-rng": generator.get_state()},
    }
    write_state(path, saved)
    expected = [random.random(), np.random.rand(), torch.rand(2), torch.rand(2, generator=generator)]
    read = read_state(path)
    random.setstate(read["random"])
    np.random.set_state(read["numpy"])
    torch.set_rng_state(read["torch"])
    generator.set_state(read["tracker"]["model-parallel-rng"])
    actual = [random.random(), np.random.rand(), torch.rand(2), torch.rand(2, generator=generator)]
    assert _shown(actual) == _shown(expected)


def test_a_tensor_at_two_paths_is_stored_once_and_its_views_are_stored_apart(path: Path) -> None:
    tensor = torch.arange(4.0)
    write_state(path, {"a": tensor, "b": [tensor.detach()], "c": tensor[:2], "d": tensor.view(torch.int32)})
    assert sorted(load_file(path)) == ["/a", "/c", "/d"]
    read = read_state(path)
    assert read["a"] is read["b"][0] and read["d"].dtype is torch.int32
    read["a"].add_(1)
    assert read["c"].tolist() == [0, 1]


def test_what_is_read_may_be_changed_and_the_file_stays(path: Path) -> None:
    write_state(path, torch.zeros(8))
    read_state(path).add_(1)
    assert read_state(path).sum() == 0


def test_tensors_of_many_chunks_and_the_smallest_are_aligned(path: Path) -> None:
    state = {
        "odd": torch.tensor([True]),
        "large": torch.randn(CHUNK // 4 + 3),
        "double": torch.ones(3).double(),
    }
    write_state(path, state)
    assert _shown(read_state(path)) == _shown(state)
    assert read_state(path)["double"].data_ptr() % 8 == 0


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (OrderedDict(a=1), r"/x/0 of the state is of type collections.OrderedDict"),
        ({1}, r"/x/0 of the state is of type builtins.set"),
        (b"1", "builtins.bytes"),
        (torch.Size([1]), "torch.Size"),
        (np.array(["a"]), "numpy.ndarray"),
        ({(1, (2,)): 3}, r"the key \(1, \(2,\)\) at /x/0"),
        (torch.ones(2, dtype=torch.complex128), "torch.complex128"),
        (torch.ones(2).to_sparse(), "copy it to a dense one in host memory"),
        (torch.ones(2, device="meta"), "on meta: copy it"),
        (torch.Generator(), "Generator"),
    ],
)
def test_a_type_that_is_not_stored_is_named_with_its_path(path: Path, value: Any, reason: str) -> None:
    with pytest.raises(StateError, match=reason):
        write_state(path, {"x": [value]})


def _file(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def _of(tree: Any) -> bytes:
    return _file(json.dumps({"__metadata__": {"state": json.dumps(tree)}}).encode())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not the file of a state"),
        (_file(b"{}")[:7], "is not the file of a state"),
        (_file(b'{"__metadata__": {"state": "1"}}')[:-4], "is not the file of a state"),
        (struct.pack("<Q", 1 << 60) + b"{}", "is not the file of a state"),
        (_file(b"{}"), "has no state in its header"),
        (_file(b'{"__metadata__": {"state": "{"}}'), "is not the file of a state"),
        (_of({"tensor": "/a"}), "'tensor' cannot be read"),
        (_of({"object": "os.system"}), "'object' cannot be read"),
        (_of({"dict": [[{"dict": []}, 1]]}), "'dict' cannot be read"),
        (_of({"dict": 3}), "'dict' cannot be read"),
        (_of({"tuple": [], "dict": []}), "a value of kind builtins.dict"),
        (_of({}), "a value of kind builtins.dict"),
        (_file(b'{"__metadata__": {"state": "' + b"[" * 5000 + b'"}}'), "is not the file of a state"),
        (_of({"float": "one"}), "'float' cannot be read"),
    ],
)
def test_another_file_is_refused_by_name(path: Path, content: bytes, reason: str) -> None:
    path.write_bytes(content)
    with pytest.raises(StateError, match=f"{path}.*{reason}"):
        read_state(path)


def test_a_pickle_is_refused_before_anything_is_read(path: Path) -> None:
    torch.save({"a": torch.ones(2)}, path)
    with pytest.raises(StateError, match="is a pickle, which could run code"):
        read_state(path)


def test_a_model_file_has_no_state(path: Path) -> None:
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(StateError, match="has no state in its header"):
        read_state(path)


def test_a_missing_file_is_missing(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_state(path.with_name("none"))


def test_flattening_copies_no_tensor() -> None:
    tensor = torch.ones(3)
    tree, tensors = flatten({"a": (tensor,)})
    assert tensors["/a/0"].data_ptr() == tensor.data_ptr() == nest(tree, tensors)["a"][0].data_ptr()
