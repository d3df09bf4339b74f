"""Which parts of which tensors trainers hold and engines want (pure)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

BLOCK = 128  # rows and columns that share one scale in FP8
_SCALE = 4  # bytes of a scale


class PlanError(ValueError):
    """What is held does not make what is wanted; the message names the tensor."""


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

    def meets(self, other: "Box") -> "Box | None":
        """What both have in common, if anything."""
        top, bottom = max(self.top, other.top), min(self.bottom, other.bottom)
        left, right = max(self.left, other.left), min(self.right, other.right)
        return Box(top, bottom, left, right) if top < bottom and left < right else None


@dataclass(frozen=True, slots=True)
class Tensor:
    """A Hugging Face tensor as it travels. ``bits`` of an element; ``scaled``: FP8 with one fp32 scale
    for each 128 x 128 block, which travels along."""

    rows: int
    columns: int = 1
    bits: int = 16
    scaled: bool = False

    @property
    def box(self) -> Box:
        """All of it."""
        return Box(0, self.rows, 0, self.columns)

    def nbytes(self, box: Box) -> int:
        """Bytes of a part. Raises PlanError for a part of a scaled tensor that cuts a block."""
        if not self.scaled:
            return box.size * self.bits // 8
        for start, stop, end in ((box.top, box.bottom, self.rows), (box.left, box.right, self.columns)):
            if start % BLOCK or (stop % BLOCK and stop != end):
                raise PlanError(f"{box} of {self.rows} x {self.columns} cuts a block of {BLOCK} x {BLOCK}")
        blocks = -(-(box.bottom - box.top) // BLOCK) * -(-(box.right - box.left) // BLOCK)
        return box.size * self.bits // 8 + blocks * _SCALE


@dataclass(frozen=True, slots=True)
class Held:
    """A part that each of ``ranks`` of the trainer holds alike."""

    tensor: str
    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A part that each of ``gpus`` of the engines takes in."""

    tensor: str
    box: Box
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Atom:
    """The largest part that travels as one: held as a whole, wanted as a whole."""

    tensor: str
    box: Box
    ranks: tuple[int, ...]
    gpus: tuple[int, ...]
    nbytes: int


def atoms(
    tensors: Mapping[str, Tensor], held: Iterable[Held], wanted: Iterable[Wanted], largest: int
) -> list[Atom]:
    """Parts of at most about ``largest`` bytes that make every wanted box exactly once.

    Raises PlanError when the held boxes of a tensor do not tile it, or a wanted box lies outside of it.
    """
    sources: dict[str, list[Held]] = {}
    for part in held:
        sources.setdefault(part.tensor, []).append(part)
    for name, parts in sources.items():
        _check_tiling(name, tensors[name], parts)
    found: list[Atom] = []
    for want in wanted:
        covered = 0
        for part in sources.get(want.tensor, ()):
            common = part.box.meets(want.box)
            if common is not None:
                covered += common.size
                found += _pieces(want.tensor, tensors[want.tensor], common, part.ranks, want.gpus, largest)
        if covered != want.box.size:  # the held boxes are disjoint: covered twice is impossible
            raise PlanError(f"{want.tensor}: {covered} of {want.box.size} elements of {want.box} are held")
    return found


def _check_tiling(name: str, tensor: Tensor, parts: list[Held]) -> None:
    boxes = sorted({part.box for part in parts})
    if len(boxes) != len(parts):
        raise PlanError(f"{name}: the same part is listed twice: give each part once, with all its ranks")
    if any(tensor.box.meets(box) != box for box in boxes):
        raise PlanError(f"{name}: a held part lies outside of {tensor.rows} x {tensor.columns}")
    for index, box in enumerate(boxes):
        for other in boxes[index + 1 :]:
            if box.meets(other):
                raise PlanError(f"{name}: held parts {box} and {other} overlap")
    if sum(box.size for box in boxes) != tensor.box.size:
        raise PlanError(f"{name}: the held parts leave a gap")


def _pieces(
    name: str, tensor: Tensor, box: Box, ranks: tuple[int, ...], gpus: tuple[int, ...], largest: int
) -> list[Atom]:
    """Cut by rows, at blocks, into pieces of at most about ``largest`` bytes."""
    total, height = tensor.nbytes(box), box.bottom - box.top
    step = height
    if total > largest:
        step = max(height * largest // total // BLOCK * BLOCK, BLOCK)
    boxes = [
        Box(top, min(top + step, box.bottom), box.left, box.right) for top in range(box.top, box.bottom, step)
    ]
    return [Atom(name, part, ranks, gpus, tensor.nbytes(part)) for part in boxes]
