"""Kept regions are read back byte for byte, from slices that tile each tensor once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_worker.weightsync.agent.chunks import Extent
from grpo_worker.weightsync.agent.peer_blobs import _cut
from grpo_worker.weightsync.planner.kept_slices import RankBlob, slices_of_kept
from grpo_worker.weightsync.planner.rank_parts import Table, table_of
from grpo_worker.weightsync.planner.regions import Box, RegionError
from grpo_worker.weightsync.protocol.link_exchange import TensorRow
from grpo_worker.weightsync.protocol.manifest import Manifest, Slice, blob_size
from grpo_worker.weightsync.protocol.region_stream import (
    COUNT,
    MOST,
    RegionPart,
    pack_request,
    pack_tensors,
    unpack_parts,
    unpack_tensors,
)
from grpo_worker.weightsync.protocol.tiling import make_plan
from grpo_worker.weightsync.sglang_plugin.contents import Contents
from grpo_worker.weightsync.sglang_plugin.recipe import Recipe, TensorSpec, record
from grpo_worker.weightsync.sglang_plugin.region_reader import RegionReader, UnreadableError
from support.direct_loads import Model, shapes

ROWS = [TensorRow("rows", (12, 5), "float32"), TensorRow("columns", (3, 8, 2), "bfloat16")]
COPIED = [name for name in shapes() if name not in ("scaled", "bias", "row")]


def tables(*kept: dict[str, list[Box]]) -> list[Table]:
    return [table_of([row.name for row in ROWS], of_rank) for of_rank in kept]


def planned(found: Sequence[Sequence[Slice]]) -> None:
    """Check that the slices make up whole tensors."""
    make_plan([Manifest(1, r, len(found), blob_size(s), "", tuple(s)) for r, s in enumerate(found)])


@given(data=st.data(), ranks=st.integers(1, 5))
def test_ranks_that_keep_overlapping_rows_and_columns_are_each_byte_read_once(
    data: st.DataObject, ranks: int
) -> None:
    def intervals(end: int) -> list[tuple[int, int]]:
        edges = sorted({0, end, *data.draw(st.lists(st.integers(0, end), max_size=ranks - 1))})
        whole = list(pairwise(edges))
        return [data.draw(st.sampled_from(whole)) for _ in range(ranks)]

    rows, columns = intervals(12), intervals(8)
    kept = [
        {"rows": [Box(*rows[r], 0, 5)], "columns": [Box(0, 3, 2 * columns[r][0], 2 * columns[r][1])]}
        for r in range(ranks)
    ]
    covered = len({i for a, b in rows for i in range(a, b)}) == 12
    covered &= len({i for a, b in columns for i in range(a, b)}) == 8
    if not covered:
        with pytest.raises(RegionError, match="no rank keeps rows or columns"):
            slices_of_kept(ROWS, tables(*kept))
        return
    found = slices_of_kept(ROWS, tables(*kept))
    planned(found)
    for rank, slices in enumerate(found):
        numbers = [0 if part.name == "rows" else 1 for part in slices]
        blob = RankBlob(slices, numbers)
        size = blob_size(slices)
        for first in range(0, size, 7):
            parts = list(blob.parts(first, min(first + 7, size)))
            assert sum(part.nbytes for part in parts) == min(7, size - first)
            for part in parts:
                of_rank = kept[rank]["rows" if part.tensor == 0 else "columns"]
                assert any(box.contains(part.box) for box in of_rank)


def test_what_all_ranks_keep_is_read_from_each_of_them_in_turn() -> None:
    rows = [TensorRow(f"t{number}", (4, 4), "float32") for number in range(6)]
    whole = {row.name: [Box(0, 4, 0, 4)] for row in rows}
    table = table_of([row.name for row in rows], whole)
    assert [len(slices) for slices in slices_of_kept(rows, [table, table, table])] == [2, 2, 2]


def test_regions_that_are_cut_along_rows_and_columns_are_refused() -> None:
    kept = tables({"rows": [Box(0, 6, 0, 2), Box(6, 12, 2, 5)]})
    with pytest.raises(RegionError, match="rows: the ranks keep regions that are cut along both"):
        slices_of_kept(ROWS, kept)


def test_bytes_beyond_a_blob_are_refused() -> None:
    (slices,) = slices_of_kept(ROWS, tables({"rows": [Box(0, 12, 0, 5)]}))
    with pytest.raises(ValueError, match="bytes 0 to 999 must lie in a blob of 240 bytes"):
        list(RankBlob(slices, [0]).parts(0, 999))


def test_messages_survive_the_wire() -> None:
    parts = [RegionPart(3, Box(1, 2, 3, 4), 1 << 40, 5), RegionPart(0, Box(0, 9), 0, 1)]
    assert unpack_parts(pack_request(parts)[COUNT.size :]) == parts
    assert unpack_tensors(pack_tensors(ROWS)) == ROWS


def loaded(
    names: Sequence[str], dtype: Callable[[str], torch.dtype]
) -> tuple[Model, Recipe, dict[str, torch.Tensor]]:
    """Record a model's recipe, and load random tensors into it."""
    specs = [TensorSpec(name, shapes()[name], dtype(name)) for name in names]
    model = Model()
    recipe = record(model, specs)
    tensors = {spec.name: torch.randn(spec.shape).to(spec.dtype) for spec in specs}
    model.load_weights(tensors.items())
    return model, recipe, tensors


def reader_of(model: Model, recipe: Recipe) -> RegionReader:
    contents = Contents()
    contents.completed([model], [recipe])
    assert contents.complete is not None
    return RegionReader(contents.complete)


@given(data=st.data())
def test_any_bytes_of_what_a_model_keeps_are_read_back(data: st.DataObject) -> None:
    model, recipe, tensors = loaded([*COPIED, "row"], lambda _: torch.float32)
    reader = reader_of(model, recipe)
    name = data.draw(st.sampled_from(sorted(reader.kept)))
    number = [row.name for row in reader.rows].index(name)
    box = reader.kept[name][0]
    width = int(np.prod(tensors[name].shape[1:]))
    region = tensors[name].view(-1, width)[box.top : box.bottom, box.left : box.right].contiguous()
    expected = region.view(-1).view(torch.uint8)
    begin = data.draw(st.integers(0, len(expected) - 1))
    nbytes = data.draw(st.integers(1, len(expected) - begin))
    into = torch.empty(nbytes, dtype=torch.uint8)
    reader.read(RegionPart(number, box, begin, nbytes), into)
    assert torch.equal(into, expected[begin : begin + nbytes])


def test_a_tensor_that_is_kept_in_a_wider_dtype_is_read_as_it_came() -> None:
    model, recipe, tensors = loaded(
        ["bias", "q_a", "kv_a"], lambda name: torch.bfloat16 if name == "bias" else torch.float32
    )
    reader = reader_of(model, recipe)
    into = torch.empty(tensors["bias"].nbytes, dtype=torch.uint8)
    reader.read(RegionPart(0, reader.kept["bias"][0], 0, len(into)), into)
    assert reader.rows[0].name == "bias" and torch.equal(into, tensors["bias"].view(torch.uint8))


def test_a_tensor_that_is_kept_in_a_narrower_dtype_cannot_be_read() -> None:
    model, recipe, _ = loaded(["bias"], lambda _: torch.float64)
    with pytest.raises(UnreadableError, match="bias came as float64 and is kept as float32"):
        reader_of(model, recipe)


def test_a_tensor_that_the_models_own_loader_loads_cannot_be_read() -> None:
    model, recipe, _ = loaded(["scaled", "bias"], lambda _: torch.float32)
    with pytest.raises(UnreadableError, match="scaled is loaded by the model's own loader"):
        reader_of(model, recipe)


def test_parameters_that_have_moved_cannot_be_read() -> None:
    model, recipe, _ = loaded(["row"], lambda _: torch.float32)
    model.row.data = torch.zeros_like(model.row.data)
    with pytest.raises(UnreadableError, match="elsewhere"):
        reader_of(model, recipe)


def test_a_version_that_was_overwritten_is_another_one_when_it_is_complete_again() -> None:
    contents, model = Contents(), Model()
    contents.completed([model], [])
    first = contents.complete
    contents.overwritten()
    assert contents.complete is None
    contents.completed([model], [])
    assert contents.complete is not first


@pytest.mark.parametrize("row", [MOST, 1000, MOST + 5, 3 * MOST])
@pytest.mark.parametrize("gap", [0, 3])
def test_extents_are_cut_into_answers_that_fit(row: int, gap: int) -> None:
    rows = 4 if row > 1000 else 10000
    extent = Extent(0, 0, 7, rows * row, 11, row, row + gap)
    if not gap:
        extent = replace(extent, row=rows * row, stride=rows * row)
    found = list(_cut(extent))
    assert all(piece.nbytes <= MOST for piece in found)
    starts = [piece.start for piece in found]
    assert starts == list(np.cumsum([7, *(piece.nbytes for piece in found)])[:-1])
    assert found[-1].start + found[-1].nbytes == 7 + rows * row
    for piece in found:
        number, within = divmod(piece.start - 7, row)
        assert piece.at == 11 + number * (row + gap) + within
