"""Scripts of slime become jobs, or an error says why not."""

from typing import Any

import pytest

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.convert.choices import Choices
from grpo_operator.convert.convert import Conversion, convert
from grpo_operator.convert.errors import ConvertError
from grpo_operator.convert.reading.readers import detect
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


def value(job: GRPOJobSpec, path: str) -> Any:
    found: Any = job.wire()
    for name in path.split("."):
        found = found[name]
    return found


@pytest.mark.parametrize(
    ("more", "path", "expected"),
    [
        ("", "data.train", "/data/dapo-math-17k/dapo-math-17k.jsonl"),
        ("", "data.answerKey", "label"),
        ("", "trainer.miniBatchSize", 16),
        ("", "totalSteps", 300),
        ("", "reward.builtin", "math"),
        ("", "algorithm.useKlLoss", False),
        ("", "algorithm.lossAggMode", "seq-mean-token-mean"),
        ("", "algorithm.clipRatioHigh", 0.2),
        ("", "algorithm.clipRatioC", 100.0),
        ("", "trainer.optimizer.lrDecayStyle", "linear"),
        ("", "trainer.parallelism.tensor", 2),
        ("", "model.architecture", "qwen3-8b"),
        ("", "mode", "colocated"),
        ("--calculate-per-token-loss", "algorithm.lossAggMode", "token-mean"),
        ("--eps-clip-high 0.28", "algorithm.clipRatioHigh", 0.28),
        ("--advantage-estimator gspo", "algorithm.policyLoss", "gspo"),
        ("--advantage-estimator ppo --lambd 0.9", "algorithm.critic.lam", 0.9),
        ("--use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl", "algorithm.klCtrl.klCoef", 0.01),
        ("--kl-coef 0.02", "algorithm.useKlInReward", True),
        ("--disable-grpo-std-normalization", "algorithm.normAdvByStd", False),
        ("--use-tis --tis-clip 3", "algorithm.rolloutCorrection.tisCap", 3.0),
        ("--num-steps-per-rollout 4", "trainer.miniBatchSize", 8),
        (
            "--dynamic-sampling-filter-path slime.filters.check_reward_nonzero_std",
            "algorithm.filterGroups.maxNumGenBatches",
            1000,
        ),
        ("--rollout-max-context-len 5120", "data.promptLength", 1024),
        ("--sglang-mem-fraction-static=0.7", "rollout.template.engine.memoryFraction", 0.7),
    ],
)
def test_an_option_becomes_a_field(more: str, path: str, expected: Any) -> None:
    assert value(spec(more), path) == expected


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--advantage-estimator cispo", "--advantage-estimator=cispo: no counterpart"),
        ("--rm-type f1", "--rm-type=f1: jobs have no such verifier: add --reward"),
        ("--use-opd", "--use-opd=true: jobs have no teacher"),
        (
            "--custom-generate-function-path a.b",
            "generate-function-path=a.b: responses have one turn",
        ),
        ("--custom-rm-path a.b", "it has slime's signature"),
        ("--use-tis --tis-clip-low 0.5", "--tis-clip-low=0.5: importance weights have an upper limit only"),
        (
            "--normalize-advantages",
            "advantages=true: advantages are normalized within groups only",
        ),
        ("--lr $LR", "--lr=${LR}: line 20: the script does not set LR"),
        ("--global-batch-size 100", "--global-batch-size=100: must be a multiple of 8"),
    ],
)
def test_what_would_train_something_else_is_an_error(more: str, message: str) -> None:
    with pytest.raises(ConvertError) as error:
        converted(more)
    assert message in str(error.value)


def test_engines_keep_their_own_gpus() -> None:
    job = spec(pool="--rollout-num-gpus 8 --rollout-num-gpus-per-engine 4")
    assert job.mode == "static" and job.rollout.template is not None and job.trainer.nodes == 2
    assert job.rollout.template.replicas == 2 and job.rollout.template.engine.tensor_parallel == 4
    assert spec(pool="--rollout-num-gpus 8", nodes=5).trainer.nodes == 4
    assert spec(pool="--rollout-num-gpus 8", rollout_nodes=2).trainer.nodes == 1
    with pytest.raises(ConvertError, match="--rollout-num-gpus is missing"):
        converted(pool="")


def test_what_is_elsewhere_or_has_no_counterpart_is_reported() -> None:
    missing = converted("--eval-interval 5 --some-flag").missing
    assert any("${MODEL_ARGS[@]}: set in another file: the model's sizes" in line for line in missing)
    assert any("--eval-interval=5: jobs do not validate" in line for line in missing)
    assert any("--some-flag=true: no counterpart is known" in line for line in missing)


def test_asynchronous_training_may_be_one_step_off() -> None:
    text = (SCRIPT % ("", "--rollout-num-gpus 8")).replace("train.py", "train_async.py")
    assert detect(text) is Framework.SLIME
    done = convert(Framework.SLIME, [text], Choices(), {})
    assert done.manifest["spec"]["staleness"] == {"maxVersionLag": 1}
