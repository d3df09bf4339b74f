"""A traced load is replayed by copies: equal bytes, few copies, no tensor silently lost."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_worker.weightsync.protocol.direct_load import DirectLoad
from grpo_worker.weightsync.protocol.fingerprint import fingerprint
from grpo_worker.weightsync.sglang_plugin.copy_plan import make_copy_plan
from grpo_worker.weightsync.sglang_plugin.load_tracer import trace_load
from grpo_worker.weightsync.sglang_plugin.loader import DirectLoader, Report, _bucket_buffers, _ExtraMemory
from grpo_worker.weightsync.sglang_plugin.receivers import DirectLoadError, Spec, StagedReceiver

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


class Wire(StagedReceiver):
    """Receiver whose transfers complete at once."""

    def __init__(self, request: DirectLoad, flats: list[torch.Tensor]) -> None:
        super().__init__(request, None)
        self.flats = flats

    def receive(self, index: int, flat: torch.Tensor, scratch: torch.Tensor) -> "Wire":
        flat.copy_(self.flats[index])
        self._received.append(fingerprint(flat))
        return self

    def wait(self) -> None: ...


def load(
    loader: DirectLoader, buckets: list[list[Spec]], seed: int, plan: str = "p", bad: int = -1
) -> Report:
    flats = [fill(bucket, seed + index) for index, bucket in enumerate(buckets)]
    prints = [int(fingerprint(flat)) for flat in flats]
    if bad >= 0:
        flats[bad][3] ^= 1
    request = DirectLoad(plan, tuple(len(bucket) for bucket in buckets), tuple(prints))
    received = DirectLoad.from_load_format(request.to_load_format())
    return loader.load(plan, buckets, Wire(received, flats))


def by_itself(buckets: list[list[Spec]], seed: int, rank: int) -> Model:
    model = Model(rank)
    for index, bucket in enumerate(buckets):
        flat = fill(bucket, seed + index)
        model.load_weights(
            (s.name, flat[s.start : s.start + s.nbytes].view(s.dtype).view(s.shape)) for s in bucket
        )
    return model


def assert_same(model: Model, other: Model) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@given(order=st.permutations(ORDER[1:]), cut=st.integers(1, len(ORDER)), rank=st.integers(0, 1))
def test_replayed_loads_equal_the_models_own_loader(order: list[str], cut: int, rank: int) -> None:
    names = ["bias", *(n for n in order if n not in ("q_a", "kv_a")), "q_a", "kv_a"]
    cut = min(cut, len(names) - 2)
    buckets = [specs(part) for part in (names[:cut], names[cut:])]
    model = Model(rank)
    loader = DirectLoader(model, "cpu")
    assert load(loader, buckets, seed=1).recorded == 2
    assert_same(model, by_itself(buckets, 1, rank))
    again = load(loader, buckets, seed=7)
    assert (again.recorded, again.by_loader) == (0, 1), "only the tensor that is computed"
    assert_same(model, by_itself(buckets, 7, rank))


def test_the_experts_of_a_layer_are_one_copy() -> None:
    model = Model()
    bucket = specs([*EXPERTS_IN_ORDER, *DOWN])
    flat = fill(bucket, 3)
    tensors = [(s.name, flat[s.start : s.start + s.nbytes].view(s.dtype).view(s.shape)) for s in bucket]
    copy_plan = make_copy_plan(trace_load(model.load_weights, tensors), flat)
    assert len(copy_plan.steps) == 2 and not copy_plan.by_loader


def test_moved_parameters_are_traced_again() -> None:
    model, buckets = Model(), [specs(ORDER)]
    loader = DirectLoader(model, "cpu")
    load(loader, buckets, seed=1)
    model.w13.data = torch.zeros_like(model.w13.data)
    assert load(loader, buckets, seed=5).recorded == 1
    assert_same(model, by_itself(buckets, 5, 0))


def test_memory_holds_two_consecutive_buckets() -> None:
    sizes = [256, 1024, 512, 2048, 256]
    buffers = _bucket_buffers(sizes, "cpu")
    assert [len(buffer) for buffer in buffers] == sizes
    assert buffers[0].untyped_storage().nbytes() == 512 + 2048
    for first, second in pairwise(buffers):
        first.fill_(1)
        second.fill_(2)
        assert bool((first == 1).all())


def test_model_work_that_needs_memory_runs_once_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_ExtraMemory, "measure", lambda _, work: (work(), 1 << 20))
    model, buckets = Model(), [specs([*ORDER[:1], "row"]), specs(["q_a", "kv_a"]), specs(DOWN)]
    loader = DirectLoader(model, "cpu")
    load(loader, buckets, seed=1)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(model, "post_load_weights", lambda: seen.append(model.w2.clone()))
    load(loader, buckets, seed=7)
    assert len(seen) == 1 and torch.equal(seen[0], model.w2)


def test_other_model_work_overlaps_the_next_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    model, buckets = Model(), [specs([*ORDER[:1], "row"]), specs(DOWN)]
    loader = DirectLoader(model, "cpu")
    load(loader, buckets, seed=1)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(model, "post_load_weights", lambda: seen.append(model.w2.clone()))
    load(loader, buckets, seed=7)
    assert len(seen) == 2 and not torch.equal(seen[0], model.w2)


@pytest.mark.parametrize(("nbytes", "when"), [(0, "bucket 0"), (1 << 20, "after loading")])
def test_failing_model_work_fails_the_load(nbytes: int, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ExtraMemory, "measure", lambda _, work: (work(), nbytes))
    model = Model()
    loader = DirectLoader(model, "cpu")
    load(loader, [specs(DOWN)], seed=1)
    monkeypatch.setattr(model, "post_load_weights", lambda: 1 / 0)
    with pytest.raises(DirectLoadError, match=f"{when}: ZeroDivisionError"):
        load(loader, [specs(DOWN)], seed=2)


def test_another_plan_is_traced_again() -> None:
    loader = DirectLoader(Model(), "cpu")
    load(loader, [specs(ORDER)], seed=1)
    assert load(loader, [specs(ORDER)], seed=1, plan="q").recorded == 1


@pytest.mark.parametrize("bad", [0, 1])
def test_a_flipped_bit_fails_the_load_after_all_buckets_arrived(bad: int) -> None:
    loader = DirectLoader(Model(), "cpu")
    buckets = [specs(ORDER), specs(DOWN)]
    with pytest.raises(DirectLoadError, match=f"bucket {bad}: its bytes are not those that were sent"):
        load(loader, buckets, seed=1, bad=bad)


def test_a_failing_loader_is_named() -> None:
    class Broken(Model):
        def _load(self, name: str, tensor: torch.Tensor) -> None:
            raise RuntimeError("size mismatch")

    with pytest.raises(DirectLoadError, match="bucket 0: RuntimeError: size mismatch"):
        load(DirectLoader(Broken(), "cpu"), [specs(ORDER)], seed=1)


def test_a_half_that_the_loader_drops_is_not_reported_as_loaded() -> None:
    report = load(DirectLoader(Model(), "cpu"), [specs(["q_a", "row"])], seed=1)
    assert report.loaded == {"row"}


def test_a_loader_that_reads_values_is_not_replayed() -> None:
    class Numbers(Model):
        def _load(self, name: str, tensor: torch.Tensor) -> None:
            if name == "row":
                self.row.data.fill_(tensor[0, 0].item())
            else:
                super()._load(name, tensor)

    report = load(DirectLoader(Numbers(), "cpu"), [specs(ORDER)], seed=1)
    assert report.by_loader == 2 and "row" in report.loaded


@given(data=st.binary(min_size=1, max_size=300), place=st.integers(0, 299), bit=st.integers(0, 7))
def test_the_fingerprint_sees_every_bit(data: bytes, place: int, bit: int) -> None:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    before = int(fingerprint(flat))
    flat[place % len(data)] ^= 1 << bit
    assert int(fingerprint(flat)) != before


def test_the_fingerprint_sees_swapped_rows() -> None:
    flat = torch.randint(0, 255, (8 * 4096 * 3 + 5,), dtype=torch.uint8)
    rows = flat[: 8 * 4096 * 3].view(3, -1)
    other = torch.cat([rows[[1, 0, 2]].flatten(), flat[8 * 4096 * 3 :]])
    assert int(fingerprint(flat)) != int(fingerprint(other))
    assert int(fingerprint(flat)) != int(fingerprint(flat[:-1]))


def test_an_invalid_direct_load_is_refused() -> None:
    text: Any = 'grpo:{"counts": [1]}'
    with pytest.raises(ValueError, match="is no direct load"):
        DirectLoad.from_load_format(text)
