"""A small model that loads as an engine's does, buckets of its tensors, and a wire that delivers them."""

from collections.abc import Iterable

import torch

from grpo_worker.weightsync.planner.rank_parts import Table
from grpo_worker.weightsync.protocol.fingerprint import fingerprint
from grpo_worker.weightsync.sglang_plugin.loader import DirectLoader, Report
from grpo_worker.weightsync.sglang_plugin.staged_receiver import Spec, StagedReceiver

EXPERTS, WIDTH, HIDDEN = 4, 3, 5


class Model(torch.nn.Module):
    """Model that loads like an engine's.

    It has fused halves, fused experts, a slice of a column-wise split, and a tensor computed from its source.
    """

    fused_a: torch.nn.Parameter
    w13: torch.nn.Parameter
    w2: torch.nn.Parameter
    row: torch.nn.Parameter
    scaled: torch.nn.Parameter
    bias: torch.nn.Parameter
    derived: torch.nn.Parameter

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank
        new = {
            "fused_a": (5, HIDDEN), "w13": (EXPERTS, 2 * WIDTH, HIDDEN), "w2": (EXPERTS, HIDDEN, WIDTH),
            "row": (HIDDEN, WIDTH), "scaled": (HIDDEN,), "bias": (EXPERTS,), "derived": (HIDDEN,),
        }  # fmt: skip
        for name, shape in new.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))
        self._waiting: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self._load(name, tensor)
        self._waiting.clear()
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.derived.data.copy_(self.row.sum(dim=1))

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        if name.startswith("experts"):
            _, number, half = name.split(".")
            if half == "down_proj":
                self.w2.data[int(number)].copy_(tensor)
            else:
                start = 0 if half == "gate_proj" else WIDTH
                self.w13.data[int(number)].narrow(0, start, WIDTH).copy_(tensor)
        elif name in ("q_a", "kv_a"):
            self._waiting[name] = tensor
            if len(self._waiting) == 2:
                self.fused_a.data.copy_(torch.cat([self._waiting["q_a"], self._waiting["kv_a"]], dim=0))
        elif name == "row":
            self.row.data.copy_(tensor.narrow(1, self.rank * WIDTH, WIDTH))
        elif name == "scaled":
            self.scaled.data.copy_(tensor * 2)
        elif name == "bias":
            self.bias.data.copy_(tensor.to(torch.float32))


def shapes() -> dict[str, tuple[int, ...]]:
    experts = {
        f"experts.{e}.{half}": (HIDDEN, WIDTH) if half == "down_proj" else (WIDTH, HIDDEN)
        for half in ("gate_proj", "up_proj", "down_proj")
        for e in range(EXPERTS)
    }
    rest = {"q_a": (2, HIDDEN), "kv_a": (3, HIDDEN), "row": (HIDDEN, 2 * WIDTH), "scaled": (HIDDEN,)}
    return experts | rest | {"bias": (EXPERTS,)}


def specs(names: Iterable[str]) -> list[Spec]:
    found, start = [], 0
    for name in names:
        dtype = torch.float64 if name == "bias" else torch.float32
        size = torch.Size(shapes()[name]).numel() * dtype.itemsize
        found.append(Spec(name, dtype, shapes()[name], start, size))
        start += size
    return found


# float64 first, so that every place is aligned
ORDER = ["bias", "q_a", "kv_a", "row", "scaled"] + [
    f"experts.{e}.{half}" for half in ("gate_proj", "up_proj") for e in range(EXPERTS)
]
EXPERTS_IN_ORDER = [f"experts.{e}.{half}_proj" for e in range(EXPERTS) for half in ("gate", "up")]
DOWN = [f"experts.{e}.down_proj" for e in range(EXPERTS)]


def fill(bucket: list[Spec], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.empty(bucket[-1].start + bucket[-1].nbytes, dtype=torch.uint8)
    for spec in bucket:
        view = flat[spec.start : spec.start + spec.nbytes].view(spec.dtype)
        view.copy_(torch.randn(view.shape, generator=generator))
    return flat


class Wire:
    """Source whose bytes are there at once."""

    def __init__(self, flats: list[torch.Tensor], prints: list[int]) -> None:
        self._flats, self._prints = iter(flats), iter(prints)

    def beat(self) -> None: ...

    def send_kept(self, table: Table) -> None: ...

    def read_into(self, flat: torch.Tensor) -> None:
        flat.copy_(next(self._flats))

    def read_fingerprint(self) -> int:
        return next(self._prints)


def load(
    loader: DirectLoader, buckets: list[list[Spec]], seed: int, plan: str = "p", bad: int = -1
) -> Report:
    flats = [fill(bucket, seed + index) for index, bucket in enumerate(buckets)]
    prints = [int(fingerprint(flat)) for flat in flats]
    if bad >= 0:
        flats[bad][3] ^= 1
    return loader.load(plan, buckets, StagedReceiver(Wire(flats, prints)))
