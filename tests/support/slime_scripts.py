"""Scripts of slime, and what becomes of them."""

from typing import Any

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.convert.choices import Choices
from grpo_operator.convert.convert import Conversion, convert
from grpo_operator.convert.reading.source import Framework

SCRIPT = """#!/bin/bash
source "${SCRIPT_DIR}/models/qwen3-8B.sh"
ROLLOUT_ARGS=(
   --prompt-data /root/dapo-math-17k/dapo-math-17k.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 300
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 4096
   --global-batch-size 128
)
GRPO_ARGS=(
   --advantage-estimator grpo
   # --use-kl-loss
   --eps-clip 0.2
   %s
)
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py \\
   --actor-num-nodes 2 --actor-num-gpus-per-node 8 %s \\
   --hf-checkpoint /root/Qwen3-8B --tensor-model-parallel-size 2 \\
   ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} ${GRPO_ARGS[@]}
"""


def converted(more: str = "", pool: str = "--colocate", **choices: Any) -> Conversion:
    return convert(Framework.SLIME, [SCRIPT % (more, pool)], Choices(**choices), {})


def spec(more: str = "", pool: str = "--colocate", **choices: Any) -> GRPOJobSpec:
    return GRPOJobSpec.model_validate(converted(more, pool, **choices).manifest["spec"])
