"""A traced load is replayed by copies: equal bytes, few copies, no tensor silently lost."""

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
from grpo_worker.weightsync.sglang_plugin.loader import DirectLoader, _bucket_buffers
from grpo_worker.weightsync.sglang_plugin.model_writer import ExtraMemory
from grpo_worker.weightsync.sglang_plugin.staged_receiver import DirectLoadError, Spec
from support.direct_loads import DOWN, EXPERTS_IN_ORDER, ORDER, Model, fill, load, specs


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
    loader = DirectLoader([model], "cpu")
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
    loader = DirectLoader([model], "cpu")
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
    monkeypatch.setattr(ExtraMemory, "measure", lambda _, work: (work(), 1 << 20))
    model, buckets = Model(), [specs([*ORDER[:1], "row"]), specs(["q_a", "kv_a"]), specs(DOWN)]
    loader = DirectLoader([model], "cpu")
    load(loader, buckets, seed=1)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(model, "post_load_weights", lambda: seen.append(model.w2.clone()))
    load(loader, buckets, seed=7)
    assert len(seen) == 1 and torch.equal(seen[0], model.w2)


def test_other_model_work_overlaps_the_next_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    model, buckets = Model(), [specs([*ORDER[:1], "row"]), specs(DOWN)]
    loader = DirectLoader([model], "cpu")
    load(loader, buckets, seed=1)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(model, "post_load_weights", lambda: seen.append(model.w2.clone()))
    load(loader, buckets, seed=7)
    assert len(seen) == 2 and not torch.equal(seen[0], model.w2)


@pytest.mark.parametrize(("nbytes", "when"), [(0, "bucket 0"), (1 << 20, "after loading")])
def test_failing_model_work_fails_the_load(nbytes: int, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExtraMemory, "measure", lambda _, work: (work(), nbytes))
    model = Model()
    loader = DirectLoader([model], "cpu")
    load(loader, [specs(DOWN)], seed=1)
    monkeypatch.setattr(model, "post_load_weights", lambda: 1 / 0)
    with pytest.raises(DirectLoadError, match=f"{when}: ZeroDivisionError"):
        load(loader, [specs(DOWN)], seed=2)


def test_another_plan_is_traced_again() -> None:
    loader = DirectLoader([Model()], "cpu")
    load(loader, [specs(ORDER)], seed=1)
    assert load(loader, [specs(ORDER)], seed=1, plan="q").recorded == 1


@pytest.mark.parametrize("bad", [0, 1])
def test_a_flipped_bit_fails_the_load_after_all_buckets_arrived(bad: int) -> None:
    loader = DirectLoader([Model()], "cpu")
    buckets = [specs(ORDER), specs(DOWN)]
    with pytest.raises(DirectLoadError, match=f"bucket {bad}: its bytes are not those that were sent"):
        load(loader, buckets, seed=1, bad=bad)


def test_a_failing_loader_is_named() -> None:
    class Broken(Model):
        def _load(self, name: str, tensor: torch.Tensor) -> None:
            raise RuntimeError("size mismatch")

    with pytest.raises(DirectLoadError, match="bucket 0: RuntimeError: size mismatch"):
        load(DirectLoader([Broken()], "cpu"), [specs(ORDER)], seed=1)


def test_a_half_that_the_loader_drops_is_not_reported_as_loaded() -> None:
    report = load(DirectLoader([Model()], "cpu"), [specs(["q_a", "row"])], seed=1)
    assert report.loaded == {"row"}


def test_a_loader_that_reads_values_is_not_replayed() -> None:
    class Numbers(Model):
        def _load(self, name: str, tensor: torch.Tensor) -> None:
            if name == "row":
                self.row.data.fill_(tensor[0, 0].item())
            else:
                super()._load(name, tensor)

    report = load(DirectLoader([Numbers()], "cpu"), [specs(ORDER)], seed=1)
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
