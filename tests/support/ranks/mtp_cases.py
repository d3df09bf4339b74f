"""Functions that run on ranks: multi-token prediction, and a reference made of transformers' parts."""

import json
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm
from transformers import AutoModelForCausalLM

from grpo_worker.checkpointing.store import directory
from grpo_worker.data.micro_batch import Batch
from grpo_worker.megatron.conversion.readers import SafetensorsWeights, SeededWeights
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.megatron.training.reductions import over_context
from support.padded import padded_tokens
from support.ranks.exports import export
from support.ranks.fidelity_cases import keep_gradients
from support.ranks.policy_cases import (
    batch,
    checkpointer,
    everywhere,
    make_model,
    own_part,
    own_rows,
    train,
    update,
    whole_weights,
)
from support.tiny_models import tiny_model

HF = tiny_model("deepseek_v3") | {"num_nextn_predict_layers": 1}
LAYER = HF["num_hidden_layers"]


def policy_of(layout: dict[str, int], packed: bool = False, mtp: bool = True) -> PolicyModel:
    return make_model(HF, layout, max_tokens=80 if packed else None, mtp=mtp)


def guesses(root: str, layout: dict[str, int], packed: bool = False) -> dict[str, Any]:
    """Compare with the reference.

    Returns the largest difference of any token's log-probability, and whether the exported files hold
    exactly the bits that were loaded.
    """
    policy = policy_of(layout, packed)
    family = policy.family
    export(Path(root), HF, policy.chunks, family)
    files, source = SafetensorsWeights(Path(root)), SeededWeights(HF, 7)
    shapes = family.shapes(HF) | family.mtp_shapes(HF)
    bitwise = all(
        torch.equal(files.read(name, 0, 0, shape[0]), source.read(name, 0, 0, shape[0]))
        for name, shape in shapes.items()
    )
    data = batch(0)
    mtp = policy._mtp
    assert mtp is not None
    mtp.broadcast_embedding()
    for chunk in policy.chunks:
        chunk.eval()
    wanted = {"guess": lambda _output, micro, width: micro.to_rows(mtp.log_probs(micro), width)}
    rows = own_part(policy, own_rows(data))
    found = policy._runner.rows(policy.chunks, rows, wanted).get("guess")
    if found is None:
        return {"bitwise": bitwise, "difference": None}
    # Of each token, the guess about the one after it.
    log_probs = padded_tokens(over_context(found), rows)[:, 1:-1]
    expected = own_rows({"guess": _reference(Path(root), data)})["guess"][:, 2:]
    seen = own_rows(data)["attention_mask"][:, 2:]
    return {"bitwise": bitwise, "difference": float(((log_probs - expected) * seen).abs().max())}


def _reference(root: Path, data: Batch) -> torch.Tensor:
    """Return log-probs [b, s] of the MTP layer, written out by hand."""
    config = json.loads((root / "config.json").read_text())
    other = root.with_name(f"{root.name}-{torch.distributed.get_rank()}")
    other.mkdir()
    for file in root.iterdir():
        (other / file.name).symlink_to(file)
    (other / "config.json").unlink()
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYER + 1}))
    model: Any = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    layer, model.model.layers = model.model.layers[LAYER], model.model.layers[:LAYER]
    model.config.num_hidden_layers = LAYER
    files, eps = SafetensorsWeights(root), HF["rms_norm_eps"]

    def own(name: str) -> torch.Tensor:
        full = f"model.layers.{LAYER}.{name}.weight"
        return files.read(full, 0, 0, files.shape(full)[0])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, (x.shape[-1],), own(name), eps)

    ids = data["input_ids"]
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        embedded = model.model.embed_tokens(ids.roll(-1, 1))
        both = torch.cat([norm(embedded, "enorm"), norm(hidden, "hnorm")], -1)
        x = linear(both, own("eh_proj"))
        turned = model.model.rotary_emb(x, positions)
        x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=turned)
        x = x[0] if isinstance(x, tuple) else x
        log_probs = model.lm_head(norm(x, "shared_head.norm")).log_softmax(-1)
    picked = log_probs[:, :-2].gather(-1, ids[:, 2:, None])[..., 0]
    return torch.nn.functional.pad(picked, (2, 0))


def gradients(layout: dict[str, int], packed: bool = False, mtp: bool = True) -> dict[str, torch.Tensor]:
    """Return the whole gradient of one GRPO step under Hugging Face names, on every rank."""
    policy = policy_of(layout, packed, mtp)
    data = own_rows(batch(0))
    data["old_log_probs"] = everywhere(policy, data)
    data["ref_log_prob"] = data["old_log_probs"] - 0.1
    policy.trainable.step = lambda: keep_gradients(policy)  # type: ignore[method-assign]
    update(policy, data, kl=0.1)
    return whole_weights(policy)


def save(root: str, layout: dict[str, int]) -> list[dict[str, float]]:
    """Train two steps, save a checkpoint, and return the two steps after it."""
    policy = policy_of(layout)
    saver = checkpointer(root, policy)
    train(policy, range(2))
    saver.save(1, {})
    saver.poll(blocking=True)
    return train(policy, range(2, 4))


def resume(root: str, layout: dict[str, int]) -> list[dict[str, float]]:
    """Return the two steps after a checkpoint."""
    policy = policy_of(layout)
    checkpointer(root, policy).load(directory(Path(root), 1))
    return train(policy, range(2, 4))


def learns_and_resumes(root: str, layout: dict[str, int]) -> dict[str, Any]:
    """Return the losses on one repeated batch, and whether a checkpoint restores the layer bit for bit."""
    policy = policy_of(layout)
    history = [step for _ in range(6) for step in train(policy, range(1))]
    saving = checkpointer(root, policy)
    saving.save(6, {})
    saving.poll(blocking=True)
    expected = train(policy, range(2))
    saving.load(directory(Path(root), 6))
    return {
        "losses": [step["actor/mtp_loss"] for step in history],
        "again": train(policy, range(2)) == expected,
    }
