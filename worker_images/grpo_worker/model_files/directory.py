"""Check that a Hugging Face directory is complete, from file names and headers alone."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from grpo_worker.model_files.config import canonical, read_json
from grpo_worker.model_files.errors import ModelFilesError, unreadable
from grpo_worker.model_files.names import INDEX

SINGLE = "model.safetensors"
_LARGEST_HEADER = 100 << 20  # bytes; the format's own limit


def check_directory(folder: Path) -> dict[str, Any]:
    """Check that a directory is complete and return its canonical ``config.json``.

    Only the header of each safetensors file is read. Raises ModelFilesError that names the first file that is
    missing, truncated or damaged.
    """
    if not folder.is_dir():
        raise ModelFilesError(folder, f"there is no such directory: {_remedy(folder)}")
    if not any(folder.iterdir()):
        raise ModelFilesError(folder, f"the directory is empty: {_remedy(folder)}")
    config = canonical(read_json(folder / "config.json"))
    if not (folder / "tokenizer.json").is_file():
        raise ModelFilesError(
            folder,
            "there is no tokenizer.json: load the tokenizer with transformers and save it there "
            "(AutoTokenizer.from_pretrained(...).save_pretrained)",
        )
    for name in weight_files(folder):
        _check_weights(folder, name)
    return config


def weight_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files. Raises ModelFilesError when there are none."""
    if (folder / INDEX).is_file():
        named = read_json(folder / INDEX).get("weight_map")
        if not isinstance(named, dict) or not named or not all(isinstance(f, str) for f in named.values()):
            raise ModelFilesError(folder, f"{INDEX} has no weight_map")
        return sorted(set(named.values()))
    if (folder / SINGLE).is_file():
        return [SINGLE]
    raise ModelFilesError(folder, f"there are no safetensors files: neither {INDEX} nor {SINGLE}")


def _check_weights(folder: Path, name: str) -> None:
    file = folder / name
    try:
        with file.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            expected = _size_by_header(handle.read(8), handle)
    except FileNotFoundError as error:
        raise ModelFilesError(folder, f"{name} is missing, which {INDEX} names") from error
    except PermissionError as error:
        raise ModelFilesError(folder, unreadable(name)) from error
    except (OSError, ValueError) as error:
        raise ModelFilesError(folder, f"{name} is damaged: {error}: copy it again") from error
    if size != expected:
        raise ModelFilesError(folder, f"{name} has {size} bytes of {expected}: copy it again")


def _size_by_header(length: bytes, handle: Any) -> int:
    """Return the size that the header of a safetensors file implies."""
    if len(length) < 8:
        raise ValueError("it ends before its header")
    (header_bytes,) = struct.unpack("<Q", length)
    if header_bytes > _LARGEST_HEADER:
        raise ValueError("it is not a safetensors file")
    try:
        header = json.loads(handle.read(header_bytes))
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError("its header is truncated or is not a table of tensors") from error
    return int(8 + header_bytes + max(ends, default=0))


def _remedy(folder: Path) -> str:
    mount = _mount_of(folder)
    if mount == Path("/"):
        return "nothing is mounted there: set spec.model.volume"
    return f"the volume at {mount} does not hold it: correct spec.model.path or spec.model.volume"


def _mount_of(folder: Path) -> Path:
    """Return the mount point of a path."""
    parent = folder
    while not os.path.ismount(parent):
        parent = parent.parent
    return parent
