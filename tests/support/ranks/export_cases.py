"""Functions that run on ranks: a model is exported to files and loaded from them."""

import pickle
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_worker.common.rank_errors import ExportError
from grpo_worker.megatron.conversion import hf_mapping
from grpo_worker.megatron.conversion.readers import SafetensorsWeights, weight_reader
from grpo_worker.megatron.export import files as export_files
from grpo_worker.megatron.export import place as export_place
from grpo_worker.megatron.export.exporter import begin_export
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.megatron.model.build import build_chunks, initialize_parallel
from grpo_worker.model_files.config import model_config
from grpo_worker.profiling.background import join
from grpo_worker.profiling.hang import Position, position, stuck_ranks
from grpo_worker.quantization.fp8 import dequantise, is_quantised, quantise
from support.ranks.exports import export, reference
from support.ranks.fidelity_cases import SEED, UnevenBiases, _logits, _tokens
from support.ranks.policy_cases import make_model, train, whole_weights
from support.stuck_store import StuckStore
from support.tiny_models import tiny_model


def _model(model: str, mtp: bool | None = None, **changes: int) -> dict[str, Any]:
    """``mtp``: None for a model without the layer that guesses the token after the next."""
    return tiny_model(model) | changes | ({} if mtp is None else {"num_nextn_predict_layers": 1})


def _loaded(hf: dict[str, Any], layout: dict[str, int], mtp: bool = False) -> list[Any]:
    parallel = Layout(world=dist.get_world_size(), **layout)
    initialize_parallel(parallel, 0)
    chunks = build_chunks(hf, parallel, mtp=mtp)
    hf_mapping.load(chunks, family_of(hf), UnevenBiases(hf, SEED))
    return chunks


def round_trip(
    root: str, model: str, layout: dict[str, int], source: str | None, mtp: bool | None = None
) -> dict[str, Any]:
    """Export to ``root``/first, start a second trainer from it and export that to ``root``/second.

    Return the largest difference of any logit from transformers' over 4 x 64 tokens in fp32 (on the last
    stage), and whether the second trainer holds the same bits.
    """
    hf, first, second = _model(model, mtp), Path(root) / "first", Path(root) / "second"
    parallel, family = Layout(world=dist.get_world_size(), **layout), family_of(hf)
    chunks = _loaded(hf, layout, bool(mtp))
    export(first, hf, chunks, family, Path(source) if source else None)
    exported = model_config(str(first))
    again = build_chunks(exported, parallel, mtp=bool(mtp))
    hf_mapping.load(again, family_of(exported), weight_reader(str(first), exported, SEED + 1))
    pairs = zip(hf_mapping.shards(chunks, family), hf_mapping.shards(again, family), strict=True)
    reloaded = all(torch.equal(a.tensor, b.tensor) for a, b in pairs)
    export(second, exported, again, family, first)
    batch, difference = _tokens(hf, 4, 64), None
    ours = _logits([chunk.eval() for chunk in chunks], parallel, batch, packed=False)
    if ours is not None:
        theirs = reference(first)
        with torch.no_grad():
            difference = float((ours - theirs(batch["input_ids"]).logits).abs().max())
    return {"reloaded": reloaded, "difference": difference}


def in_fp8(root: str, model: str, layout: dict[str, int]) -> dict[str, int]:
    """Export a model whose shards split blocks in FP8, and count its tensors by how they are read back.

    Keys: equal to the whole matrix after quantising and dequantising, kept as they were, or otherwise.
    """
    hf = _model(model, intermediate_size=320, moe_intermediate_size=160, hidden_size=192)
    export(Path(root), hf, _loaded(hf, layout), family_of(hf), quantization="fp8-block128")
    files, source = SafetensorsWeights(Path(root)), UnevenBiases(hf, SEED)
    counts = {"quantised": 0, "kept": 0, "otherwise": 0}
    for name, shape in family_of(hf).shapes(hf).items():
        expected, kind = source.read(name, 0, 0, shape[0]), "kept"
        if is_quantised(name):
            values, scale = quantise(expected)
            expected, kind = dequantise(values.float(), scale), "quantised"
        same = files.shape(name) == shape and torch.equal(files.read(name, 0, 0, shape[0]), expected)
        counts[kind if same else "otherwise"] += 1
    return counts


def in_bf16(root: str) -> None:
    """Export a model that is trained in bf16."""
    hf = _model("deepseek_v3")
    layout = Layout(world=1)
    initialize_parallel(layout, 0)
    chunks = build_chunks(hf, layout, torch.bfloat16)
    hf_mapping.load(chunks, family_of(hf), UnevenBiases(hf, SEED))
    export(Path(root), hf, chunks, family_of(hf))


def with_a_full_disk(root: str, layout: dict[str, int], rank: int) -> str:
    """Export while a rank cannot write and return this rank's error; a second try, with room, succeeds."""
    hf, target = _model("deepseek_v3"), Path(root)
    chunks, message = _loaded(hf, layout), ""
    try:
        with _no_room(dist.get_rank() == rank):
            export(target, hf, chunks, family_of(hf))
    except ExportError as error:
        message = str(error)
    dist.barrier()
    assert list(target.parent.iterdir()) == [], "something was left behind"
    dist.barrier()
    export(target, hf, chunks, family_of(hf))
    return message


@contextmanager
def _no_room(limited: bool) -> Iterator[None]:
    """Limit the files of this process to 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def on_a_slow_store(root: str, layout: dict[str, int]) -> list[list[int]]:
    """Return the ranks that the hang detector names while rank 0 writes each of its files."""
    hf, request = _model("deepseek_v3"), Path(root).with_name("request")
    stuck: list[list[int]] = []
    chunks, rank, thread = _loaded(hf, layout), dist.get_rank(), threading.get_ident()

    def save_slowly(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.5)  # now the other rank waits
        stuck.append(stuck_ranks([position(0, thread), _ask(request)]))
        save_file(*args, **kwargs)

    if rank:
        threading.Thread(target=_answer, args=(request, thread), daemon=True).start()
    save = save_slowly if rank == 0 else save_file
    with patch.object(export_files, "FILE_BYTES", 150_000), patch.object(export_place, "save_file", save):
        export(Path(root), hf, chunks, family_of(hf))
    return stuck


def beside_steps(root: str, layout: dict[str, int]) -> dict[str, Any]:
    """Export while the store is stuck and training goes on.

    Returns the steps, the weights that were exported, and whether the export was complete meanwhile.
    """
    policy = make_model(_model("deepseek_v3"), layout)
    target, store = Path(root) / "step-00000001", StuckStore(Path(root))
    history, weights = train(policy, range(1)), whole_weights(policy)
    store.begin()
    with patch.object(export_files, "FILE_BYTES", 150_000):
        writing = begin_export(target, tiny_model("deepseek_v3"), policy.chunks, policy.family)
    history += train(policy, range(1, 3))
    early = writing.done(), sorted(store.waited)
    store.end()
    join(writing)
    return {"history": history, "weights": weights, "early": early, "after": whole_weights(policy)}


def steps_beside_nothing(layout: dict[str, int]) -> list[dict[str, float]]:
    """Return the steps of ``beside_steps`` without an export."""
    return train(make_model(_model("deepseek_v3"), layout), range(3))


def _ask(request: Path) -> Position:
    """Return the current position of rank 1."""
    request.touch()
    answer = request.with_suffix(".pickle")
    while not answer.exists():
        time.sleep(0.01)
    current: Position = pickle.loads(answer.read_bytes())
    answer.unlink()
    return current


def _answer(request: Path, thread: int) -> None:
    while True:
        time.sleep(0.01)
        if request.exists():
            request.unlink()
            whole = request.with_suffix(".partial")
            whole.write_bytes(pickle.dumps(position(1, thread)))
            whole.rename(request.with_suffix(".pickle"))
