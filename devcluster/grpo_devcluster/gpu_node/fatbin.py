"""Blanks the GPU code of other architectures in a shared library, so that the library packs small.

CUDA's compiler puts all GPU code of a library into one ELF section, ``.nv_fatbin``: a row of containers, at
aligned offsets. A container is a header (magic, version, its own length, length of what follows) and entries.
An entry is one program for one architecture: a header (kind, version, its own length, length of the program,
and at byte 28 the architecture), and the program: machine code or PTX. The driver reads headers until it
finds an entry for its GPU. So a program for another GPU can be overwritten with zeros where it is: no offset
changes, and xz makes nothing of zeros.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAGIC = (0xBA55ED50).to_bytes(4, "little")
_CONTAINER = struct.Struct("<4sHHQ")  # magic, version, length of this header, length of the entries
_ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, length of this header, of the program; architecture
_ALIGNMENT = 8  # of containers
_SECTION = struct.Struct("<IIQQQQIIQQ")  # ELF: offset of the name, type, …, offset (4) and length (5)
_PTX, _MACHINE_CODE = 1, 2


@dataclass(frozen=True, slots=True)
class Program:
    """GPU code for one architecture, as 90 for compute capability 9.0, at ``start`` of the file."""

    kind: int
    architecture: int
    start: int
    length: int


def prune(library: Path, architecture: int) -> int:
    """Blank the programs that a GPU of this architecture does not load, and return their bytes."""
    blanked = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        for start, length in _sections(content, b".nv_fatbin"):
            for programs in containers(content, start, start + length):
                for program in unused(programs, architecture):
                    content[program.start : program.start + program.length] = bytes(program.length)
                    blanked += program.length
    return blanked


def unused(programs: list[Program], architecture: int) -> list[Program]:
    """Return the programs of a container that a GPU of this architecture does not load.

    Without machine code for the GPU, the driver compiles the PTX of the same or an earlier architecture.
    """
    ready = [p for p in programs if p.kind == _MACHINE_CODE and p.architecture == architecture]
    loaded = ready or [p for p in programs if p.kind == _PTX and p.architecture <= architecture]
    return [p for p in programs if p not in loaded]


def containers(content: mmap.mmap | bytes, start: int, end: int) -> Iterator[list[Program]]:
    """Yield the programs of each container between two offsets."""
    at = start
    while at + _CONTAINER.size <= end:
        magic, _, header, length = _CONTAINER.unpack_from(content, at)
        if magic != _MAGIC:  # padding
            at += _ALIGNMENT
            continue
        stop = at + header + length
        yield list(_programs(content, at + header, stop))
        at = stop + -stop % _ALIGNMENT


def _programs(content: mmap.mmap | bytes, start: int, end: int) -> Iterator[Program]:
    at = start
    while at < end:
        kind, _, header, length, architecture = _ENTRY.unpack_from(content, at)
        yield Program(kind, architecture, at + header, length)
        at += header + length


def _sections(content: mmap.mmap, wanted: bytes) -> Iterator[tuple[int, int]]:
    """Yield offset and length of the sections of this name in a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", content, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", content, 0x3A)
    headers = [_SECTION.unpack_from(content, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    for header in headers:
        name = names + header[0]
        if content[name : name + len(wanted) + 1] == wanted + b"\0":
            yield header[4], header[5]
