"""Functions that run on ranks: versions of weights, published and exported."""

from pathlib import Path

import torch.distributed as dist
from policy_cases import make, train

from grpo_worker.megatron.export import export
from grpo_worker.megatron.presets import model_config
from grpo_worker.weightsync import manifest


def publish_versions(root: str, layout: dict[str, int], versions: int) -> None:
    """Train a step, publish it and export it as a Hugging Face directory; ``versions`` times."""
    policy = make(layout)
    for version in range(1, versions + 1):
        train(policy, range(version, version + 1))
        parts = [(s.name, s.shape, s.dim, s.offset, s.tensor) for s in policy.shards()]
        folder = Path(root) / f"update-{version}"
        manifest.publish(folder, version, dist.get_rank(), dist.get_world_size(), parts)
        hf = model_config("preset:tiny-moe")
        export(Path(root) / f"hf-{version}", hf, policy.chunks, policy.family)
