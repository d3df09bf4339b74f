"""Small jobs whose steps are measured on real pods (pure). All but ``HELD_OUT`` calibrate the step model.

The second job that is held out was chosen and measured when the model was final.
"""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from grpo_devcluster.paths import REPO
from grpo_operator.api.catalog.architectures import architecture

TINY, SECOND = "tiny-moe", "tiny-moe-spread"
HELD_OUT = (TINY, SECOND)
STEPS = 30
_MANIFEST: dict[str, Any] = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())["spec"]

DENSE: dict[str, Any] = architecture("qwen3-8b") | {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NARROW: dict[str, Any] = DENSE | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
DEEP: dict[str, Any] = DENSE | {"num_hidden_layers": 10}
EXPERTS: dict[str, Any] = architecture("tiny-moe") | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 2,
    "n_routed_experts": 16,
}
WIDE: dict[str, Any] = architecture("tiny-moe") | {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
}


@dataclass(frozen=True, slots=True)
class PodCase:
    """A job. ``model``: config.json; None: the manifest's. ``layout``: of ``nodes`` ranks, one for a pod.

    ``prompts``, ``group``, ``response``: of a step; responses rarely end earlier. ``micro``: rows of a
    micro-batch; 0: all rows of a step.
    """

    model: dict[str, Any] | None
    nodes: int
    engines: int
    prompts: int
    group: int
    response: int
    layout: dict[str, int] = field(default_factory=lambda: {"tensor": 1})
    steps: int = STEPS
    micro: int = 0

    def spec(self, name: str, models: Path) -> dict[str, Any]:
        """Return the job's spec; its model is in ``models/NAME``."""
        spec = copy.deepcopy(_MANIFEST) | {"totalSteps": self.steps}
        if self.model is None:
            return spec
        spec["model"] = {
            "path": f"/models/{name}",
            "volume": {"path": str(models), "mountPath": "/models"},
        }
        spec["data"] |= {"trainBatchSize": self.prompts, "responseLength": self.response}
        spec["algorithm"]["samplesPerPrompt"] = self.group
        spec["rollout"]["template"]["replicas"] = self.engines
        spec["trainer"] |= {
            "nodes": self.nodes,
            "parallelism": self.layout,
            "miniBatchSize": self.prompts,
            "microBatchSizePerGpu": self.micro or self.prompts * self.group,
        }
        return spec


CASES = {
    TINY: PodCase(None, 2, 2, 8, 16, 4, {"tensor": 2, "expert": 2, "expertTensor": 1}, 60),
    SECOND: PodCase(architecture("tiny-moe"), 2, 1, 12, 8, 10, {"tensor": 1, "expert": 2, "expertTensor": 1}),
    "dense": PodCase(DENSE, 1, 1, 8, 16, 4),
    "dense-tensor": PodCase(DENSE, 2, 2, 4, 8, 16, {"tensor": 2, "expertTensor": 2}),
    "dense-long": PodCase(DENSE, 1, 1, 2, 8, 48, micro=4),
    "deep-data": PodCase(DEEP, 2, 2, 8, 8, 8),
    "deep": PodCase(DEEP, 1, 1, 4, 8, 8),
    "experts": PodCase(EXPERTS, 1, 1, 4, 16, 8),
    "experts-long": PodCase(EXPERTS, 1, 2, 2, 8, 32, micro=8),
    "experts-split": PodCase(EXPERTS, 2, 2, 4, 16, 12, {"tensor": 2, "expert": 2, "expertTensor": 1}),
    "experts-spread": PodCase(EXPERTS, 2, 1, 8, 8, 8, {"tensor": 1, "expert": 2, "expertTensor": 1}),
    "experts-many": PodCase(EXPERTS, 2, 1, 8, 20, 4, {"tensor": 1, "expert": 2, "expertTensor": 1}, 20),
    "narrow": PodCase(NARROW, 1, 1, 8, 20, 4, steps=20),
    "wide": PodCase(WIDE, 1, 1, 8, 8, 8, steps=15),
}
