"""Functions that run on ranks: a tiny policy, its steps and its weights."""

import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.checkpoint.filesystem import FileSystemReader

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.offload import OffloadSpec
from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.algorithms.losses import PolicyLossConfig
from grpo_worker.checkpointing.state_file import read_state, write_state
from grpo_worker.checkpointing.store import DamagedCheckpointError, Origin, complete_steps, directory
from grpo_worker.common.ragged_batch import INPUT_IDS, RaggedBatch, spread_spans
from grpo_worker.common.store_problems import UnwritableStoreError
from grpo_worker.data.micro_batch import Batch
from grpo_worker.megatron.checkpoint import owned_state, snapshot
from grpo_worker.megatron.checkpoint.checkpointer import Checkpointer
from grpo_worker.megatron.checkpoint.pieces import CHUNK
from grpo_worker.megatron.conversion.hf_mapping import Shard
from grpo_worker.megatron.conversion.readers import SeededWeights
from grpo_worker.megatron.model.build import device, initialize_parallel
from grpo_worker.megatron.optim.optimizer import inner_optimizers
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.megatron.training.reductions import active_parameters, all_parameters
from grpo_worker.megatron.training.runner import MicroBatching
from grpo_worker.megatron.training.setup import ModelSetup
from grpo_worker.model_files.config import model_config
from grpo_worker.profiling.progress import PROGRESS
from grpo_worker.roles.trainer_models import rank_info
from grpo_worker.weightsync.trainer import publisher
from support.padded import padded_tokens, ragged, token_weights
from support.recompute import recompute_of
from support.stuck_store import StuckStore

SEED = 7
NOTHING = OffloadSpec()
EVERYTHING = OffloadSpec(parameters=True, gradients=True, optimizer=True)


def make(layout: dict[str, int], lr: float = 1e-3, recompute: str = "none") -> PolicyModel:
    return make_model(model_config("preset:tiny-moe"), layout, lr, recompute)


def make_model(
    hf: dict[str, Any],
    layout: dict[str, int],
    lr: float = 1e-3,
    recompute: str = "none",
    max_tokens: int | None = None,
    replay_routing: bool = False,
    initialised: bool = False,
    offload: OffloadSpec = NOTHING,
    mtp: bool = False,
) -> PolicyModel:
    parallel = Layout(world=dist.get_world_size(), **layout)
    if not initialised:
        initialize_parallel(parallel, SEED)
    batching = MicroBatching(4, max_tokens)
    setup = ModelSetup(
        hf, parallel, SeededWeights(hf, SEED), batching,
        recompute=recompute_of(recompute), offload=offload, mtp=mtp,
    )  # fmt: skip
    return PolicyModel(setup, OptimizerSpec(lr=lr), 100, replay_routing=replay_routing)


def figures(layout: dict[str, int]) -> tuple[int, dict[str, float]]:
    """Return the active parameters, and the router metrics of one step."""
    policy = make(layout)
    data = own_rows(batch(0))
    data["old_log_probs"] = data["ref_log_prob"] = everywhere(policy, data)
    metrics = update(policy, data)
    active = active_parameters(policy.chunks, policy.family)
    return active, {name: value for name, value in metrics.items() if name.startswith("moe/")}


def batch(step: int, rows: int = 8, length: int = 32) -> Batch:
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, 128, (rows, length), generator=generator)
    lengths = torch.randint(length // 2 + 2, length + 1, (rows, 1), generator=generator)
    seen = torch.arange(length).expand(rows, length) < lengths
    mask = seen.float()
    mask[:, : length // 2] = 0
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, length).contiguous()
    return {"input_ids": ids, "attention_mask": seen, "advantages": advantages * mask,
            "response_mask": mask, "weights": token_weights(mask, "token-mean", length)}  # fmt: skip


def own_rows(data: Batch) -> Batch:
    """Return this data-parallel rank's rows of a batch."""
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    return {name: column.chunk(ranks)[rank] for name, column in data.items()}


def everywhere(policy: PolicyModel, data: Batch, reference: bool = False) -> torch.Tensor:
    """Return log-probs on every pipeline stage, as the controller would distribute them."""
    return on_every_rank(log_probs(policy, data, reference), data)


def log_probs(policy: PolicyModel, data: Batch, reference: bool = False) -> torch.Tensor | None:
    """Return this rank's log-probs [rows, tokens] of a padded batch; None outside the last stage."""
    rows = own_part(policy, data)
    found = policy.log_probs(rows, 1.0, reference).get("log_probs")
    return None if found is None else padded_tokens(found, rows)


def update(
    policy: PolicyModel,
    data: Batch,
    loss: PolicyLossConfig | None = None,
    kl: float = 0.01,
    check: bool = False,
) -> dict[str, float]:
    """Take an optimizer step on a padded batch."""
    return policy.update(own_part(policy, data), loss or PolicyLossConfig(), kl, 1.0, check)


def own_part(policy: PolicyModel, data: Batch) -> RaggedBatch:
    """Return a padded batch with what this rank reads, and nothing else."""
    rows = ragged(data, policy.expert_layers, partial(policy.context_spans, data["input_ids"].shape[1]))
    return cut(rows, policy.layout, policy.packs)


def cut(rows: RaggedBatch, layout: Layout, packs: bool) -> RaggedBatch:
    """Return rows with the token ids and response columns that this rank reads, and 0 elsewhere."""
    models: Any = SimpleNamespace(policy=SimpleNamespace(layout=layout, packs=packs))
    info, every = rank_info(dist.get_rank(), models), range(rows.rows)
    split = info.split(rows.width)
    if split is None:
        return rows
    spans = split.read(rows.lengths)
    taken = rows.take_column(INPUT_IDS, every, spans)
    ids = spread_spans(taken, rows.lengths, np.zeros_like(rows.lengths), spans)
    spans = split.predicted(rows.lengths)
    response = {
        name: spread_spans(
            rows.take_column(name, every, spans), rows.response_lengths, rows.prompt_lengths, spans
        )
        for name in rows.response
    }
    return replace(rows, input_ids=ids, response=response)


def on_every_rank(tensor: torch.Tensor | None, data: Batch) -> torch.Tensor:
    """Return what the context-parallel ranks of the last stage have together, on every rank."""
    moved = on_every_stage(tensor, data).to(device())
    dist.all_reduce(moved, group=parallel_state.get_context_parallel_group())
    return moved.cpu()


def on_every_stage(tensor: torch.Tensor | None, data: Batch) -> torch.Tensor:
    """Return the last stage's tensor on every stage."""
    whole = torch.zeros(data["input_ids"].shape) if tensor is None else tensor
    moved = whole.to(device())
    dist.all_reduce(moved, group=parallel_state.get_pipeline_model_parallel_group())
    return moved.cpu()


def train(policy: PolicyModel, steps: range) -> list[dict[str, float]]:
    history = []
    for step in steps:
        data = own_rows(batch(step))
        data["old_log_probs"] = everywhere(policy, data)
        data["ref_log_prob"] = everywhere(policy, data, reference=True)
        history.append(update(policy, data))
    await_weights(policy)
    return history


def await_weights(policy: PolicyModel) -> None:
    """Wait for the weights of the last step, as every reader of them does."""
    with policy.trainable.weights.on_device():
        pass


def whole_weights(policy: PolicyModel) -> dict[str, torch.Tensor]:
    """Return all weights under their Hugging Face names, assembled from every rank's shards."""
    with policy.trainable.weights.on_device():
        return assembled(policy.shards())


def assembled(shards: Iterable[Shard]) -> dict[str, torch.Tensor]:
    """Return whole tensors, assembled from every rank's own shards."""
    local = [(s.name, s.shape, s.dim, s.offset, s.tensor.cpu().clone()) for s in shards if s.owner]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    out: dict[str, torch.Tensor] = {}
    for name, shape, dim, offset, tensor in (item for part in gathered for item in part):
        whole = out.setdefault(name, torch.full(shape, float("nan")))
        whole.narrow(dim, offset, tensor.shape[dim]).copy_(tensor)
    return out


def steps(layout: dict[str, int], count: int, recompute: str = "none") -> list[dict[str, float]]:
    return train(make(layout, recompute=recompute), range(count))


def steps_offloaded(root: str, layout: dict[str, int], count: int) -> dict[str, Any]:
    """Run ``steps`` with all state offloaded between steps, and with a checkpoint and a snapshot.

    Also returns the bytes on the device between steps and afterwards.
    """
    policy = make_model(model_config("preset:tiny-moe"), layout, offload=EVERYTHING)
    before = _resident(policy)
    history = train(policy, range(count))
    held = [before, _resident(policy)]
    saving = checkpointer(root, policy)
    saving.save(count, {})
    copy = snapshot.capture(policy.parts(False))
    held.append(_resident(policy))
    history += train(policy, range(count, count + 1))
    saving.poll(blocking=True)
    after = _known(policy)
    saving.load(directory(Path(root), count))
    again = [train(policy, range(count, count + 1))]
    snapshot.restore(policy.parts(False), copy)
    again.append(train(policy, range(count, count + 1)))
    return {"history": history, "again": again, "held": held, "weights": after}


def steps_saved_from_host(root: str, layout: dict[str, int], count: int) -> dict[str, Any]:
    """Run ``steps`` with a checkpoint of offloaded state, which stays in host memory meanwhile.

    Also returns the tensors moved and the bytes on the device meanwhile, and the step after a restore.
    """
    policy = make_model(model_config("preset:tiny-moe"), layout, offload=EVERYTHING)
    history = train(policy, range(count))
    saving = Checkpointer(root, policy.parts(True), 2, Origin("tiny", str(policy.layout)))
    moved = PROGRESS.amounts()["tensors moved"]
    saving.save(count, {}, from_host=True)
    moved, resident = PROGRESS.amounts()["tensors moved"] - moved, _resident(policy)
    history += train(policy, range(count, count + 1))  # while the checkpoint is being written
    saving.poll(blocking=True)
    weights = _known(policy)
    saving.load(directory(Path(root), count))
    again = train(policy, range(count, count + 1))
    return {"history": history, "again": again, "moved": moved, "resident": resident, "weights": weights}


def _known(policy: PolicyModel) -> dict[str, torch.Tensor]:
    with policy.trainable.weights.on_device():
        return whole_weights(policy)


def _resident(policy: PolicyModel) -> int:
    """Return the bytes of weights, gradients and Adam's moments on the device."""
    trainable = policy.trainable
    buffers = [b for ddp in trainable.ddp for b in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    tensors = [part for b in buffers for part in (b.param_data, b.grad_data)]
    tensors += [p for chunk in policy.reference for p in chunk.parameters()]
    for inner in inner_optimizers(trainable.optimizer):
        tensors += [state[name] for state in inner.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def steps_and_weights(layout: dict[str, int], count: int) -> dict[str, Any]:
    policy = make(layout)
    return {"history": train(policy, range(count)), "weights": whole_weights(policy)}


def checkpointer(root: str, policy: PolicyModel) -> Checkpointer:
    return Checkpointer(root, policy.parts(False), 2, Origin("tiny", str(policy.layout)))


def save(root: str, layout: dict[str, int], chunk: int = CHUNK, saves: int = 1) -> list[dict[str, float]]:
    """Train two steps, save checkpoints, and return the two steps after them.

    ``chunk``: elements of a chunk of the optimizer state at most.
    """
    patch.object(owned_state, "CHUNK", chunk).start()  # until this process ends
    policy = make(layout)
    saver = checkpointer(root, policy)
    train(policy, range(2))
    for number in range(saves):
        saver.save(number + 1, {})
        saver.poll(blocking=True)
    return train(policy, range(2, 4))


def resume(root: str, layout: dict[str, int], chunk: int = CHUNK, step: int = 1) -> list[dict[str, float]]:
    """Return the two steps after a checkpoint, which any layout may have saved."""
    patch.object(owned_state, "CHUNK", chunk).start()  # until this process ends
    policy = make(layout)
    checkpointer(root, policy).load(directory(Path(root), step))
    return train(policy, range(2, 4))


def load_damaged(root: str, layout: dict[str, int], fqn: str) -> str:
    """Save a checkpoint, change a bit of a tensor in it, and return the error that loading it raises."""
    policy = make(layout)
    saver = checkpointer(root, policy)
    train(policy, range(1))
    saver.save(1, {})
    saver.poll(blocking=True)
    if dist.get_rank() == 0:
        change_a_bit(directory(Path(root), 1), fqn)
    dist.barrier()
    try:
        saver.load(directory(Path(root), 1))
    except DamagedCheckpointError as error:
        return str(error)
    return "it was loaded"


def change_a_bit(checkpoint: Path, fqn: str) -> None:
    """Change a bit in the middle of a tensor's values."""
    places = FileSystemReader(checkpoint).read_metadata().storage_data
    place = next(place for index, place in places.items() if index.fqn == fqn)
    with (checkpoint / place.relative_path).open("r+b") as file:
        file.seek(place.offset + place.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))


def save_and_resume(root: str, layout: dict[str, int]) -> dict[str, Any]:
    """Return steps 0-3 with a checkpoint after 1, and steps 2-3 repeated from that checkpoint."""
    policy = make(layout)
    saver = checkpointer(root, policy)
    train(policy, range(2))
    saver.save(1, {"cursor": 16})
    undisturbed = train(policy, range(2, 4))  # while the checkpoint is being written
    saver.poll(blocking=True)
    expected = whole_weights(policy)
    saver.load(directory(Path(root), 1))
    resumed = train(policy, range(2, 4))
    actual = whole_weights(policy)
    equal = all(torch.equal(expected[name], actual[name]) for name in expected)
    return {"undisturbed": undisturbed, "resumed": resumed, "weights_equal": equal}


def save_on_a_stuck_store(root: str, layout: dict[str, int]) -> dict[str, Any]:
    """Train on while the store is stuck at the beginning of a checkpoint, and then at its end.

    Returns the steps, what was complete while the store was stuck and afterwards, the files that were waited
    for, and the steps that follow when the checkpoint is loaded.
    """
    policy, store = make(layout), StuckStore(Path(root))
    saver = checkpointer(root, policy)
    history = train(policy, range(1))
    for old in (1, 2):
        saver.save(old, {})
        assert saver.poll(blocking=True) == [old] * (dist.get_rank() == 0)
    store.begin()
    saver.save(3, {"cursor": 16})
    history += train(policy, range(1, 2))
    polled = [saver.poll()]
    created = sorted(store.waited)
    store.end()
    saver._queue.async_calls[0].async_caller.close()  # the ranks have written their files
    store.begin()
    polled.append(saver.poll())  # begins to mark the checkpoint
    history += train(policy, range(2, 3))
    polled.append(saver.poll())
    marked = sorted(store.waited)
    store.end()
    finished = saver.poll(blocking=True)
    complete = complete_steps(Path(root))
    saver.load(directory(Path(root), 3))
    return {"history": history, "polled": polled, "created": created, "marked": marked, "finished": finished,
            "complete": complete, "resumed": train(policy, range(1, 3))}  # fmt: skip


def saved_parameters(root: str, layout: dict[str, int]) -> int:
    """Save a checkpoint and return how many parameters the ranks count."""
    policy = make(layout)
    saver = checkpointer(root, policy)
    train(policy, range(1))
    saver.save(1, {})
    saver.poll(blocking=True)
    return all_parameters(policy.chunks, policy.family)


def save_on_a_full_store(root: str, layout: dict[str, int]) -> tuple[str, int]:
    """Return text and number of the error of a checkpoint for which the store has too little room."""
    policy = make(layout)
    saver = checkpointer(root, policy)
    train(policy, range(1))
    filled = Path(root) / "filled"
    if dist.get_rank() == 0:
        with filled.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(root).free - 2**20)
    dist.barrier()
    saver.save(1, {})
    try:
        saver.poll(blocking=True)
    except UnwritableStoreError as error:
        return str(error), error.errno
    raise AssertionError("the checkpoint was saved")


def snapshot_and_resume(root: str, layout: dict[str, int]) -> dict[str, Any]:
    """Return steps 0-3 with a snapshot after 1, and steps 2-3 repeated from it in another model."""
    policy = make(layout)
    train(policy, range(2))
    file = Path(root) / f"rank-{dist.get_rank()}.safetensors"
    write_state(file, snapshot.capture(policy.parts(True)))
    undisturbed, expected = train(policy, range(2, 4)), whole_weights(policy)
    again = make_model(model_config("preset:tiny-moe"), layout, initialised=True)
    train(again, range(7, 8))
    snapshot.restore(again.parts(True), read_state(file))
    mapped = file.name in Path("/proc/self/maps").read_text()  # its memory could not be freed
    resumed, actual = train(again, range(2, 4)), whole_weights(again)
    equal = all(torch.equal(expected[name], actual[name]) for name in expected)
    return {"undisturbed": undisturbed, "resumed": resumed, "weights_equal": equal, "mapped": mapped}


def publish(
    root: str, layout: dict[str, int], version: int = 3, steps: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Publish a version after some steps; return log-probs and ids of a batch."""
    policy = make(layout)
    train(policy, range(steps))
    parts = [(s.name, s.shape, s.dim, s.offset, s.tensor) for s in policy.shards()]
    publisher.publish(Path(root), version, dist.get_rank(), dist.get_world_size(), parts)
    data = _full(batch(5)["input_ids"])
    return everywhere(policy, data), data["input_ids"]


def _full(ids: torch.Tensor) -> Batch:
    """Return a batch of rows without padding."""
    return {"input_ids": ids, "attention_mask": torch.ones(ids.shape, dtype=torch.bool)}


def replay(layout: dict[str, int], ids: list[list[int]], experts: list[Any]) -> torch.Tensor:
    """Return log-probs of ``publish``'s policy with these experts replayed."""
    policy = make_model(model_config("preset:tiny-moe"), layout, replay_routing=True)
    train(policy, range(1))
    data = _full(torch.tensor(ids)) | {"routed_experts": torch.tensor(experts, dtype=torch.int16)}
    return everywhere(policy, data)
