"""Scripts of slime become jobs, or an error says why not."""

import re
from typing import Any

import pytest

from grpo_devcluster.paths import REPO
from grpo_operator.convert.choices import Choices
from grpo_operator.convert.convert import convert
from grpo_operator.convert.errors import ConvertError
from grpo_operator.convert.reading.readers import detect
from grpo_operator.convert.reading.source import Framework
from grpo_operator.convert.rules import Fact, Take
from grpo_operator.convert.slime.fill import TABLE
from support.slime_scripts import SCRIPT, converted, spec
from support.verl_scripts import value


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
    missing = converted("--eval-config x.yaml --some-flag").missing
    assert any("${MODEL_ARGS[@]}: set in another file: the model's sizes" in line for line in missing)
    assert any("--eval-config=x.yaml: see validation" in line for line in missing)
    assert any("--some-flag=true: no counterpart is known" in line for line in missing)


def test_asynchronous_training_may_be_one_step_off() -> None:
    text = (SCRIPT % ("", "--rollout-num-gpus 8")).replace("train.py", "train_async.py")
    assert detect(text) is Framework.SLIME
    done = convert(Framework.SLIME, [text], Choices(), {})
    assert done.manifest["spec"]["staleness"] == {"maxVersionLag": 1}


def test_validation_samples_as_the_training_does_unless_the_script_says_otherwise() -> None:
    sets = "--eval-interval 20 --eval-prompt-data aime /root/aime-2024.jsonl gpqa /root/gpqa.jsonl"
    found = spec(
        f"{sets} --n-samples-per-eval-prompt 16 --eval-max-response-len 2048 --skip-eval-before-train"
    )
    validation = found.validation
    assert validation is not None and validation.every_steps == 20 and not validation.before_training
    assert {one.name: one.data for one in validation.sets} == {
        "aime": "/data/root/aime-2024.jsonl",
        "gpqa": "/data/root/gpqa.jsonl",
    }
    assert (validation.samples_per_prompt, validation.temperature) == (16, found.algorithm.temperature)
    assert validation.response_length == 2048
    long = spec(f"{sets} --eval-max-response-len 16384").rollout.template
    assert long is not None and long.engine.context_length == 16384 + found.data.prompt_length
    greedy = spec(f"{sets} --n-samples-per-eval-prompt 4 --eval-temperature 0").validation
    assert greedy is not None and (greedy.temperature, greedy.samples_per_prompt) == (0, 1)
    assert spec("--eval-prompt-data aime /root/aime-2024.jsonl").validation is None


def _rows_of_the_guide() -> list[tuple[str, str]]:
    """Return options and fields of each row of the table."""
    guide = (REPO / "docs" / "guides" / "from-verl.md").read_text()
    section = guide.partition("## The most used options of slime\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (`--.+?) \| (.+) \|$", section, re.MULTILINE)


def test_the_guides_table_says_what_becomes_of_each_option() -> None:
    rows = _rows_of_the_guide()
    assert len(rows) >= 15
    for options, fields in rows:
        for name in re.findall(r"`(--[\w-]+)`", options):
            rule = TABLE[name]
            assert isinstance(rule, Take | Fact), name
            path = rule.field if isinstance(rule, Take) else re.split(r"[ ,]", rule.about)[0]
            group, _, field = path.rpartition(".")
            assert re.search(rf"\b{field}\b", fields) or (group and group in fields), f"{name}: {path}"
