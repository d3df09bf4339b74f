"""Cases of kernels.py about what the kernels compute, and what checkpoints keep."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernel_models import BF16, ENGINE, FP8, LOCAL, ONE, SMALL, Kind, discard, free, policy, setup
from megatron.core import dist_checkpointing
from trainer_speed import DeviceWeights, rows_of

from grpo_worker.algorithms.losses import PolicyLossConfig
from grpo_worker.checkpointing.store import Origin, directory
from grpo_worker.megatron.checkpoint.checkpointer import Checkpointer
from grpo_worker.megatron.conversion import hf_mapping
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.quantization.fp8 import dequantise, quantise

KINDS: dict[str, Kind] = {
    "local": (LOCAL, BF16), "transformer_engine": (ENGINE, BF16), "fp8": (ENGINE, FP8),
}  # fmt: skip


def small() -> dict[str, Any]:
    return {case.__name__: case() for case in (fidelity, packed, checkpoint, scales)}


def fidelity() -> dict[str, Any]:
    """Return the distance of log-probabilities and gradients of each kind from local kernels in fp32."""
    batch = rows_of([512] * 4, 0)
    wanted = _computed((LOCAL, BF16), torch.float32, batch)
    found: dict[str, Any] = {}
    for name, kind in KINDS.items():
        log_probs, gradients = _computed(kind, torch.bfloat16, batch)
        gap = np.abs(log_probs - wanted[0])
        found[name] = {"logprob_mean": float(gap.mean()), "logprob_max": float(gap.max())}
        found[name] |= _distance(gradients, wanted[1])
    return found


def _computed(kind: Kind, dtype: torch.dtype, batch: Any) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    model = policy(SMALL, kind, dtype)
    log_probs = model.log_probs(batch, 1.0)["log_probs"]
    discard(model)
    gradients = _gradients(kind, dtype)
    free()
    return log_probs, gradients


def _gradients(kind: Kind, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return gradients by Hugging Face name, in host memory, fp32."""
    (model,) = setup(SMALL, kind, dtype).build()
    family = family_of(SMALL)
    hf_mapping.load([model], family, DeviceWeights(SMALL))
    ids = torch.randint(0, SMALL["vocab_size"], (1, 1024), generator=torch.Generator().manual_seed(2)).cuda()
    positions = torch.arange(ids.shape[1], device="cuda")[None]
    model(ids, positions, None, labels=ids.roll(-1, 1)).mean().backward()
    found = {}
    for name, parameter in model.named_parameters():
        names = hf_mapping.hf_names(model, family, name)
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for hf_name, part in zip(names, grad.chunk(len(names)), strict=True):
            found[hf_name] = part.float().cpu()
    return found


def _distance(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the relative distance of all gradients, and of the tensor that is farthest."""
    assert ours.keys() == wanted.keys(), "the kernels have other tensors"
    apart = {name: (float((ours[name] - wanted[name]).norm()), float(wanted[name].norm())) for name in wanted}
    whole = sum(a**2 for a, _ in apart.values()) ** 0.5 / sum(n**2 for _, n in apart.values()) ** 0.5
    return {"gradient": whole, "gradient_largest": max(a / n for a, n in apart.values() if n > 0)}


def packed() -> dict[str, Any]:
    """Return the difference of log-probabilities between packed and padded sequences."""
    batch, found = rows_of([100, 512, 37, 300, 411, 64], 3), {}
    for name, kind in KINDS.items():
        answers = []
        for most in (None, 2048):
            model = policy(SMALL, kind, max_tokens=most)
            answers.append(model.log_probs(batch, 1.0)["log_probs"])
            discard(model)
        gap = np.abs(answers[0] - answers[1])
        found[name] = {"mean": float(gap.mean()), "max": float(gap.max())}
    return found


def checkpoint() -> dict[str, bool]:
    """Return whether a checkpoint has the same bits after a model with other kernels loaded and saved it."""
    found = {}
    for first, second in (("local", "transformer_engine"), ("transformer_engine", "local"), ("local", "fp8")):
        with tempfile.TemporaryDirectory() as folder:
            model = policy(SMALL, KINDS[first])
            model.update(rows_of([256] * 4, 1), PolicyLossConfig(), 0.001, 1.0)
            saved = _saved(Path(folder) / "first", model)
            other = policy(SMALL, KINDS[second])
            Checkpointer(str(saved.parent), other.parts(False), 1, _ORIGIN).load(saved)
            found[f"{first} to {second}"] = _same(saved, _saved(Path(folder) / "second", other))
            other.update(rows_of([256] * 4, 2), PolicyLossConfig(), 0.001, 1.0)
            discard(model)
            discard(other)
    return found


_ORIGIN = Origin("model", str(ONE))


def _saved(root: Path, model: PolicyModel) -> Path:
    root.mkdir()
    checkpoints = Checkpointer(str(root), model.parts(False), 1, _ORIGIN)
    checkpoints.save(1, {})
    checkpoints.poll(blocking=True)
    return directory(root, 1)


def _same(first: Path, second: Path) -> bool:
    """Return whether two checkpoints have the same tensors, and the same step of the optimizer."""
    ours, theirs = (_tensors(dist_checkpointing.load_plain_tensors(str(path))) for path in (first, second))
    steps = [_step(path) for path in (first, second)]
    print(len(ours), "tensors; steps of the optimizers:", steps, flush=True)
    return (
        steps[0] == steps[1] > 0
        and ours.keys() == theirs.keys()
        and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    )


def _tensors(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, dict):
            found |= _tensors(value, f"{prefix}{key}.")
    return found


def _step(path: Path) -> int:
    common = dist_checkpointing.load_common_state_dict(str(path))["policy."]["optimizer"]
    groups = (common if "optimizer" in common else common[0])["optimizer"]["param_groups"]
    return int(groups[0]["step"])


def scales() -> dict[str, float]:
    """Return how FP8 blocks of Transformer Engine differ from those that engines get."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    generator = torch.Generator("cuda").manual_seed(5)
    weight = torch.randn(7168, 2048, device="cuda", generator=generator).mul(0.02).bfloat16()
    quantizer = Float8BlockQuantizer(
        tex.DType.kFloat8E4M3, rowwise=True, columnwise=False, force_pow_2_scales=False, block_scaling_dim=2
    )
    theirs = quantizer(weight)
    values, scale = quantise(weight)
    their_scale = theirs._rowwise_scale_inv[: scale.shape[0], : scale.shape[1]]
    on_host = quantise(weight.cpu())
    same_bits = theirs._rowwise_data.view(torch.uint8) == values.view(torch.uint8)
    apart = (theirs.dequantize(dtype=torch.float32) - dequantise(values.float(), scale)).abs()
    return {
        "scales_equal_share": float((their_scale == scale).float().mean()),
        "scale_difference_max": float((their_scale / scale - 1).abs().max()),
        "values_equal_share": float(same_bits.float().mean()),
        "weight_difference_max": float(apart.max()),
        "as_on_cpu": float(torch.equal(on_host[1], scale.cpu()) and torch.equal(on_host[0], values.cpu())),
    }
