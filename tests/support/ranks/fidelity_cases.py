"""Functions that run on ranks: our model compared with transformers on exported files."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.moe.router import TopKRouter

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_worker.algorithms.losses import PolicyLossConfig
from grpo_worker.data.micro_batch import Batch, MicroBatch
from grpo_worker.megatron.conversion import hf_mapping
from grpo_worker.megatron.conversion.readers import SafetensorsWeights, SeededWeights
from grpo_worker.megatron.families.registry import expert_layers, family_of
from grpo_worker.megatron.model.build import build_chunks, device, initialize_parallel
from grpo_worker.megatron.training.runner import MicroBatching, Runner
from support.padded import ragged
from support.ranks.exports import export, reference
from support.ranks.policy_cases import (
    batch,
    everywhere,
    log_probs,
    make_model,
    own_part,
    own_rows,
    update,
    whole_weights,
)
from support.tiny_models import tiny_model

SEED = 5


class UnevenBiases(SeededWeights):
    """The preset starts with equal biases; the routing must agree with unequal ones too."""

    def read(self, name: str, dim: int, offset: int, length: int) -> torch.Tensor:
        if name.endswith("e_score_correction_bias"):
            return torch.linspace(-0.2, 0.2, self.shape(name)[0]).narrow(dim, offset, length)
        return super().read(name, dim, offset, length)


def _tokens(hf: dict[str, Any], rows: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, hf["vocab_size"], (rows, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones(rows, length, dtype=torch.bool)}


def _logits(chunks: list[Any], layout: Layout, batch: Batch, packed: bool) -> torch.Tensor | None:
    """Return logits [b, s, vocab] from the pipeline schedule; None outside the last stage."""
    rows, length = batch["input_ids"].shape
    runner = Runner(layout, MicroBatching(2, max_tokens=2 * length if packed else None))
    collected = torch.zeros(rows, length, 0)

    def collect(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        nonlocal collected
        whole = _whole_rows(gather_from_tensor_model_parallel_region(logits), micro).float().cpu()
        if not collected.numel():
            collected = torch.zeros(rows, length, whole.shape[-1])
        for place, row in enumerate(micro.indices):
            start = micro.bounds[place] if micro.bounds else 0
            collected[row] = whole[0, start : start + length] if micro.bounds else whole[place, :length]
        return logits.sum()

    with torch.no_grad():
        runner.run(chunks, runner.micro_batches(ragged(batch)), collect, forward_only=True)
    return collected if collected.numel() else None


def _whole_rows(tokens: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Join the tokens [b, s / cp, vocab] of all context-parallel ranks: [b, s, vocab]."""
    whole = micro.whole(tokens).clone()
    dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole


def against_transformers(
    root: str, model: str, layout: dict[str, int], packed: bool = False
) -> dict[str, Any]:
    """Compare with transformers on exported files.

    Returns the largest difference of any logit over 4 x 64 tokens in fp32 (on the last stage), whether the
    exported files hold exactly the bits that were loaded, and whether loading restores them.
    """
    hf, parallel = tiny_model(model), Layout(world=dist.get_world_size(), **layout)
    family = family_of(hf)
    initialize_parallel(parallel, 0)
    source = UnevenBiases(hf, SEED)
    chunks = build_chunks(hf, parallel)
    hf_mapping.load(chunks, family, source)
    export(Path(root), hf, chunks, family)
    files = SafetensorsWeights(Path(root))
    result: dict[str, Any] = {"bitwise": _same(files, source, family.shapes(hf))}
    again = build_chunks(hf, parallel)
    hf_mapping.load(again, family, files)
    pairs = zip(hf_mapping.shards(chunks, family), hf_mapping.shards(again, family), strict=True)
    result["reloaded"] = all(torch.equal(a.tensor, b.tensor) for a, b in pairs)
    batch = _tokens(hf, 4, 64)
    ours = _logits([chunk.eval() for chunk in chunks], parallel, batch, packed)
    result["difference"] = None
    if ours is not None:
        theirs = reference(root)
        with torch.no_grad():
            result["difference"] = float((ours - theirs(batch["input_ids"]).logits).abs().max())
    return result


def _same(files: SafetensorsWeights, source: SeededWeights, shapes: dict[str, tuple[int, ...]]) -> bool:
    return all(
        files.shape(name) == shape
        and torch.equal(files.read(name, 0, 0, shape[0]), source.read(name, 0, 0, shape[0]))
        for name, shape in shapes.items()
    )


def routing(root: str, model: str) -> dict[str, Any]:
    """Return the experts that the routers of both choose for 1024 tokens, layer by layer (one rank)."""
    hf, layout = tiny_model(model), Layout(world=1)
    initialize_parallel(layout, 0)
    (ours,) = build_chunks(hf, layout)
    hf_mapping.load([ours], family_of(hf), UnevenBiases(hf, SEED))
    export(Path(root), hf, [ours], family_of(hf))
    chosen: list[torch.Tensor] = []
    for module in ours.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(lambda _m, _i, out: chosen.append(out[1].bool()))
    ids = _tokens(hf, 8, 128)["input_ids"].to(device())
    positions = torch.arange(128, device=device()).expand(8, -1).contiguous()
    with torch.no_grad():
        ours.eval()(ids, positions, None)
    theirs = reference(root)
    expected = _transformers_routing(theirs.to(device()), ids, hf)
    # Megatron's order is [tokens, rows], transformers' [rows, tokens].
    ordered = [c.reshape(128, 8, -1).transpose(0, 1).reshape(1024, -1) for c in chosen]
    equal = [bool(torch.equal(a, b)) for a, b in zip(ordered, expected, strict=True)]
    used = [int((layer.sum(0) > 0).sum()) for layer in ordered]
    return {"tokens": 1024, "equal": equal, "experts_used": used}


def _transformers_routing(model: Any, ids: torch.Tensor, hf: dict[str, Any]) -> list[torch.Tensor]:
    """Return bool [tokens, experts] for each expert layer, from the inputs of its experts module."""
    experts = hf.get("n_routed_experts") or hf["num_experts"]
    chosen: list[torch.Tensor] = []

    def note(_module: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        indices = keywords.get("top_k_index", inputs[1] if len(inputs) > 1 else None)
        assert indices is not None
        none = torch.zeros(len(indices), experts, device=indices.device)
        chosen.append(none.scatter(1, indices, 1).bool())

    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(ids)
    return chosen


def gradients(model: str, layout: dict[str, int], packed: bool = False) -> dict[str, torch.Tensor]:
    """Return the whole gradient of one GRPO step under Hugging Face names, on every rank."""
    policy = make_model(tiny_model(model), layout, max_tokens=80 if packed else None)
    data = own_rows(batch(0))
    data["old_log_probs"] = everywhere(policy, data)
    data["ref_log_prob"] = data["old_log_probs"] - 0.1
    with patch.object(policy.trainable, "step", lambda: keep_gradients(policy)):
        update(policy, data, PolicyLossConfig(entropy_coef=0.01), 0.1)
    return whole_weights(policy)


def keep_gradients(policy: Any) -> dict[str, float]:
    """Replace the weights by the reduced gradients, instead of an optimizer step."""
    for ddp in policy.trainable.ddp:
        for buffer in [*ddp.buffers, *ddp.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:  # the distributed optimizer leaves each rank its part
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.copy_(parameter.main_grad)
    return {}


def replayed(
    model: str, layout: dict[str, int], packed: bool = False, recompute: str = "none"
) -> dict[str, torch.Tensor]:
    """Return the gradient of a step with randomly drawn experts, under Hugging Face names."""
    hf = tiny_model(model)
    policy = make_model(
        hf, layout, max_tokens=80 if packed else None, recompute=recompute, replay_routing=True
    )
    data = batch(0)
    data["routed_experts"] = random_experts(hf, *data["input_ids"].shape)
    data = own_rows(data)
    data["old_log_probs"] = everywhere(policy, data)
    data["ref_log_prob"] = data["old_log_probs"] - 0.1
    with patch.object(policy.trainable, "step", lambda: keep_gradients(policy)):
        update(policy, data, kl=0.1)
    return whole_weights(policy)


def random_experts(hf: dict[str, Any], rows: int, length: int) -> torch.Tensor:
    layers = expert_layers(hf)
    experts = hf.get("n_routed_experts") or hf["num_experts"]
    noise = torch.rand(rows, length, len(layers.moe), experts, generator=torch.Generator().manual_seed(4))
    return noise.topk(layers.topk).indices.to(torch.int16)


def agreement(layout: dict[str, int], packed: bool = False) -> float:
    """Return the share of randomly drawn experts that the routers would choose too."""
    hf = tiny_model("deepseek_v3")
    policy = make_model(hf, layout, max_tokens=80 if packed else None, replay_routing=True)
    data = batch(0)
    data["routed_experts"] = random_experts(hf, *data["input_ids"].shape)
    return policy.router_agreement(own_part(policy, own_rows(data)))


def own_choice_replayed(model: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Return log-probs with the routers' own choice, with it replayed and with a random choice.

    The last value is the routers' agreement with their own choice.
    """
    hf = tiny_model(model)
    policy = make_model(hf, {}, replay_routing=True)
    data = batch(0)
    chosen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _m, _i, out: chosen.append(out[1].bool()))
        for module in policy.chunks[0].modules()
        if isinstance(module, TopKRouter)
    ]
    own = log_probs(policy, data)
    for hook in hooks:
        hook.remove()
    topk, layers, length = expert_layers(hf).topk, len(hooks), data["input_ids"].shape[1]
    # Two micro-batches of four rows; within each the routers ran layer by layer.
    parts = [c.nonzero()[:, 1].reshape(length, 4, topk).transpose(0, 1) for c in chosen]
    halves = [torch.stack(parts[i * layers : (i + 1) * layers], dim=2) for i in range(2)]
    same, other = (
        log_probs(policy, data | {"routed_experts": experts})
        for experts in (torch.cat(halves).to(torch.int16), random_experts(hf, 8, length))
    )
    chosen_again = data | {"routed_experts": torch.cat(halves).to(torch.int16)}
    agreed = policy.router_agreement(own_part(policy, chosen_again))
    assert own is not None and same is not None and other is not None, "one rank is the last stage"
    return own, same, other, agreed
