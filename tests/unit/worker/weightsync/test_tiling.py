"""Plans of a weight update: complete tensors, stable ids, fused halves in one bucket."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_worker.weightsync.protocol.bucketing import buckets
from grpo_worker.weightsync.protocol.manifest import Manifest, Slice
from grpo_worker.weightsync.protocol.tiling import PlanError, make_plan
from grpo_worker.weightsync.trainer.publisher import publish


def manifests(cuts: dict[str, list[int]], world: int, version: int = 1) -> list[Manifest]:
    """Return one manifest per rank; tensor ``name`` is split along dim 0 into ``cuts[name]`` rows."""
    slices: list[list[Slice]] = [[] for _ in range(world)]
    for index, (name, rows) in enumerate(sorted(cuts.items())):
        offset = 0
        for piece, length in enumerate(rows):
            shape = (sum(rows), 4)
            part = Slice(name, shape, "float32", 0, offset, length, 0, length * 16)
            slices[(index + piece) % world].append(part)
            offset += length
    return [Manifest(version, r, world, 0, "", tuple(s)) for r, s in enumerate(slices)]


layouts = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    min_size=1,
    max_size=8,
)


@given(cuts=layouts, world=st.integers(1, 5))
def test_every_row_of_every_tensor_is_covered_once(cuts: dict[str, list[int]], world: int) -> None:
    plan = make_plan(manifests(cuts, world))
    assert {t.name: t.shape for t in plan.tensors} == {n: (sum(r), 4) for n, r in cuts.items()}
    for tensor in plan.tensors:
        rows = [i for _, p in tensor.pieces for i in range(p.offset, p.offset + p.length)]
        assert rows == list(range(tensor.shape[0]))


@given(cuts=layouts, world=st.integers(1, 4), data=st.data())
def test_a_lost_or_doubled_slice_is_refused(
    cuts: dict[str, list[int]], world: int, data: st.DataObject
) -> None:
    found = manifests(cuts, world)
    rank = data.draw(st.sampled_from([m.rank for m in found if m.slices]))
    victim = found[rank]
    doubled = data.draw(st.booleans())
    rest = victim.slices + victim.slices[:1] if doubled else victim.slices[1:]
    name = victim.slices[0].name
    if not doubled and len(cuts[name]) == 1:
        return  # a tensor that is missing as a whole is the model's business, not the plan's
    found[rank] = replace(victim, slices=rest)
    with pytest.raises(PlanError, match=name):
        make_plan(found)


def test_missing_ranks_and_mixed_versions_are_refused() -> None:
    found = manifests({"a": [2, 2]}, 2)
    with pytest.raises(PlanError, match=r"ranks \[1\], expected 0 to 1"):
        make_plan(found[1:])
    with pytest.raises(PlanError, match="different versions"):
        make_plan([found[0], replace(found[1], version=2)])


def test_the_plan_id_names_the_layout_not_the_version() -> None:
    first = make_plan(manifests({"a": [2, 2]}, 2)).plan_id
    assert make_plan(manifests({"a": [2, 2]}, 2, version=9)).plan_id == first
    assert make_plan(manifests({"a": [1, 3]}, 2)).plan_id != first


@given(cuts=layouts, limit=st.integers(1, 400))
def test_buckets_hold_every_tensor_once_within_the_limit(cuts: dict[str, list[int]], limit: int) -> None:
    plan = make_plan(manifests(cuts, 2))
    sizes = {t.name: math.prod(t.shape) * 4 for t in plan.tensors}
    groups = buckets(plan.tensors, sizes, limit)
    assert sorted(name for group in groups for name in group) == sorted(sizes)
    assert all(len(g) == 1 or sum(sizes[n] for n in g) <= limit for g in groups)


@pytest.mark.parametrize("kind", ["weight", "weight_scale_inv"])
def test_halves_fused_by_sglang_share_a_bucket(kind: str) -> None:
    """In two requests SGLang answers 200 to both and silently writes neither."""
    prefix = "model.layers.0.self_attn."
    names = [prefix + f"q_a_proj.{kind}", prefix + f"kv_a_proj_with_mqa.{kind}", "z"]
    plan = make_plan(manifests({name: [2] for name in names}, 1))
    groups = buckets(plan.tensors, dict.fromkeys(names, 10), limit=10)
    assert sorted(map(sorted, groups)) == [sorted(names[:2]), ["z"]]


def test_published_files_name_their_slices_and_old_ones_are_deleted(tmp_path: Path) -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    for version in (1, 2, 3):
        published = publish(tmp_path, version, 0, 1, [("w", (3, 4), 0, 0, tensor)])
        path = tmp_path / f"v{version}" / "rank-0.json"
        assert Manifest.from_json(path.read_text()) == published
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v2", "v3"]
    before = (tmp_path / "v2" / "rank-0.bin").stat().st_ino
    publish(tmp_path, 4, 0, 1, [("w", (3, 4), 0, 0, tensor + 1)])
    publish(tmp_path, 5, 0, 1, [("w", (2, 4), 0, 0, tensor[:2])])  # of another size: no memory to reuse
    blob = tmp_path / "v5" / "rank-0.bin"
    assert torch.equal(
        torch.frombuffer(bytearray(blob.read_bytes()), dtype=torch.float32), tensor[:2].flatten()
    )
    assert before != blob.stat().st_ino
