"""Regions of tensors that trainer ranks hold and engines need. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from grpo_worker.weightsync.protocol.buffers import item_bytes

BLOCK = 128  # rows and columns that share one scale in FP8
SCALE_BYTES = 4  # of an fp32 scale
FP8 = "float8_e4m3fn"


class RegionError(ValueError):
    """The held regions do not make up the needed ones; the message names the tensor."""


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Rows [top, bottom) and columns [left, right) of a tensor; a vector is one column."""

    top: int
    bottom: int
    left: int = 0
    right: int = 1

    @property
    def size(self) -> int:
        """Number of elements."""
        return (self.bottom - self.top) * (self.right - self.left)

    def contains(self, other: "Box") -> bool:
        """Return whether ``other`` lies in this region."""
        inside = self.top <= other.top and other.bottom <= self.bottom
        return inside and self.left <= other.left and other.right <= self.right

    def intersection(self, other: "Box") -> "Box | None":
        """Return the common region, or None if it is empty."""
        top, bottom = max(self.top, other.top), min(self.bottom, other.bottom)
        left, right = max(self.left, other.left), min(self.right, other.right)
        return Box(top, bottom, left, right) if top < bottom and left < right else None


@dataclass(frozen=True, slots=True)
class Tensor:
    """A Hugging Face tensor as it is sent; a tensor of more dimensions is rows of flattened columns.

    ``dtype``: torch's name. A tensor in FP8 has one fp32 scale for each block of 128 x 128, sent with it.
    """

    rows: int
    columns: int = 1
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        try:
            item_bytes(self.dtype)
        except ValueError as error:
            raise RegionError(str(error)) from error

    @property
    def scaled(self) -> bool:
        """True for FP8, whose scales are sent with the values."""
        return self.dtype == FP8

    @property
    def box(self) -> Box:
        """Region of the whole tensor."""
        return Box(0, self.rows, 0, self.columns)

    def nbytes(self, box: Box) -> int:
        """Return the bytes of a region, with its scales."""
        return self.value_bytes(box) + self.scale_bytes(box)

    def value_bytes(self, box: Box) -> int:
        """Return the bytes of a region's values."""
        return box.size * item_bytes(self.dtype)

    def scale_bytes(self, box: Box) -> int:
        """Return the bytes of a region's scales. Raises RegionError if it cuts a block of a scaled tensor."""
        if not self.scaled:
            return 0
        for start, stop, end in ((box.top, box.bottom, self.rows), (box.left, box.right, self.columns)):
            if start % BLOCK or (stop % BLOCK and stop != end):
                raise RegionError(f"{box} of {self.rows} x {self.columns} cuts a block of {BLOCK} x {BLOCK}")
        return scale_box(box).size * SCALE_BYTES


def scale_box(box: Box) -> Box:
    """Return the region of the scales that belong to a region of values."""
    return Box(box.top // BLOCK, -(-box.bottom // BLOCK), box.left // BLOCK, -(-box.right // BLOCK))


@dataclass(frozen=True, slots=True)
class Held:
    """A region that each of ``ranks`` of the trainer holds."""

    tensor: str
    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Needed:
    """A region that each of ``gpus`` of the engines needs."""

    tensor: str
    box: Box
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Atom:
    """A region that is sent as one piece: each rank holds all of it, and each GPU needs all of it."""

    tensor: str
    box: Box
    ranks: tuple[int, ...]
    gpus: tuple[int, ...]
    nbytes: int


def atoms(
    tensors: Mapping[str, Tensor], held: Iterable[Held], needed: Iterable[Needed], largest: int
) -> list[Atom]:
    """Divide the needed regions into atoms of at most about ``largest`` bytes.

    Raises RegionError if the held regions of a tensor do not tile it, or a needed region lies outside of it.
    """
    sources: dict[str, list[Held]] = {}
    for part in held:
        sources.setdefault(part.tensor, []).append(part)
    for name, parts in sources.items():
        _check_tiling(name, tensors[name], parts)
    result: list[Atom] = []
    for need in needed:
        covered = 0
        for part in sources.get(need.tensor, ()):
            common = part.box.intersection(need.box)
            if common is not None:
                covered += common.size
                result += _pieces(need.tensor, tensors[need.tensor], common, part.ranks, need.gpus, largest)
        if covered != need.box.size:  # the held boxes are disjoint, so nothing is covered twice
            raise RegionError(f"{need.tensor}: {covered} of {need.box.size} elements of {need.box} are held")
    return result


def _check_tiling(name: str, tensor: Tensor, parts: list[Held]) -> None:
    boxes = sorted({part.box for part in parts})
    if len(boxes) != len(parts):
        raise RegionError(f"{name}: the same part is listed twice: give each part once, with all its ranks")
    if any(tensor.box.intersection(box) != box for box in boxes):
        raise RegionError(f"{name}: a held part lies outside of {tensor.rows} x {tensor.columns}")
    for index, box in enumerate(boxes):
        for other in boxes[index + 1 :]:
            if box.intersection(other):
                raise RegionError(f"{name}: held parts {box} and {other} overlap")
    if sum(box.size for box in boxes) != tensor.box.size:
        raise RegionError(f"{name}: the held parts leave a gap")


def _pieces(
    name: str, tensor: Tensor, box: Box, ranks: tuple[int, ...], gpus: tuple[int, ...], largest: int
) -> list[Atom]:
    """Divide a region by rows, at block boundaries, into atoms of at most about ``largest`` bytes."""
    total, height = tensor.nbytes(box), box.bottom - box.top
    step = height
    if total > largest:
        step = max(height * largest // total // BLOCK * BLOCK, BLOCK)
    boxes = [
        Box(top, min(top + step, box.bottom), box.left, box.right) for top in range(box.top, box.bottom, step)
    ]
    return [Atom(name, part, ranks, gpus, tensor.nbytes(part)) for part in boxes]
