"""A file with nested Python state: tensors as in safetensors, everything else as JSON in its header.

The safetensors package writes a file in one call, which shows no byte to a digest. So the file is written
here, in one pass that also computes the digest. The package reads it: it maps the file and checks the header.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from grpo_worker.checkpointing.snapshot_seal import content_digest
from grpo_worker.checkpointing.state_tree import StateError, flatten, nest

CHUNK = 1 << 20  # small enough to stay in the processor's cache between the digest and the write
_FIELD = "state"
# Of torch.save, and plain ones of each protocol.
_PICKLES = (
    b"PK\x03\x04",
    b"\x80\x02",
    b"\x80\x03",
    b"\x80\x04",
    b"\x80\x05",
)
_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16",
    torch.uint32: "U32", torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.complex64: "C64",
}  # fmt: skip


def write_state(path: Path, state: Any) -> str:
    """Write a state; return the digest of the file.

    No tensor is copied, except one at a time that is not contiguous. Raises StateError for a type that is not
    stored, and OSError.
    """
    tree, tensors = flatten(state)
    # Larger elements first, so that each tensor is aligned.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    digest = content_digest()
    with path.open("wb", buffering=0) as file:
        for piece in _pieces(_header(tree, ordered), ordered):
            digest.update(piece)
            _write_all(file, piece)
    return digest.hexdigest()


def read_state(path: Path) -> Any:
    """Read a state. Its tensors are the mapped file itself: copy those that stay, or its memory stays too.

    Raises StateError when the file is not one that ``write_state`` writes, and OSError.
    """
    with path.open("rb") as file:
        begin = file.read(9)
    if begin.startswith(_PICKLES) and not begin.endswith(b"{"):  # a header's length may look like one
        raise StateError(f"{path} is a pickle, which could run code: it is not read")
    try:
        with safe_open(path, framework="pt") as contents:
            tree = json.loads((contents.metadata() or {})[_FIELD])
            names = contents.keys()
            return nest(tree, {name: contents.get_tensor(name) for name in names})
    except KeyError as error:
        raise StateError(f"{path} has no state in its header: it was written by something else") from error
    except (SafetensorError, ValueError, RecursionError) as error:
        raise StateError(f"{path} is not the file of a state: {error}") from error


def _header(tree: Any, tensors: dict[str, torch.Tensor]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {_FIELD: json.dumps(tree, allow_nan=False)}}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise StateError(f"{name} of the state is of {tensor.dtype}, which is not stored")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        fields[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _pieces(header: bytes, tensors: dict[str, torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    for tensor in tensors.values():
        if not tensor.numel():
            continue
        whole = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        data = whole.numpy().data
        for begin in range(0, len(data), CHUNK):
            yield data[begin : begin + CHUNK]


def _write_all(file: Any, piece: memoryview) -> None:
    while piece:
        piece = piece[file.write(piece) :]
