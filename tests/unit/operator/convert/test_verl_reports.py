"""Options of verl that are refused or reported, and the reading of its scripts."""

import pytest

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.convert.choices import Choices
from grpo_operator.convert.convert import convert
from grpo_operator.convert.errors import ConvertError
from grpo_operator.convert.reading.readers import detect
from grpo_operator.convert.reading.source import Framework
from support.verl_scripts import BASE, A, R, T, converted, script


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"algorithm.adv_estimator": "remax"},
            "algorithm.adv_estimator=remax: no counterpart: use one of grpo",
        ),
        (
            {f"{A}.policy_loss.loss_mode": "clip_cov"},
            "loss_mode=clip_cov: no counterpart: use one of vanilla, gspo",
        ),
        ({f"{A}.kl_loss_type": "abs"}, "kl_loss_type=abs: no counterpart"),
        ({f"{A}.ppo_epochs": "2"}, "ppo_epochs=2: each batch is trained on once"),
        ({"actor_rollout_ref.model.lora_rank": "8"}, "lora_rank=8: jobs train all weights"),
        ({f"{R}.multi_turn.enable": "True"}, "multi_turn.enable=True: responses have one turn"),
        (
            {"algorithm.rollout_correction.rollout_is": "sequence"},
            "rollout_is=sequence: rolloutCorrection weights",
        ),
        ({"algorithm.rollout_correction.rollout_rs": "token"}, "rollout_rs=token: samples are weighted, not"),
        ({"algorithm.something_new": "1"}, "algorithm.something_new=1: it is unknown here and may change"),
        (
            {
                f"{A}.use_kl_loss": "True",
                "algorithm.use_kl_in_reward": "True",
                f"{A}.kl_loss_coef": "0.1",
                "algorithm.kl_ctrl.kl_coef": "0.2",
            },
            "kl_ctrl.kl_coef=0.2: klCtrl.klCoef is one coefficient",
        ),
        (
            {"actor_rollout_ref.ref.model.path": "Qwen/Qwen3-4B"},
            "ref.model.path=Qwen/Qwen3-4B: the reference is the policy at its start",
        ),
        (
            {"actor_rollout_ref.model.path": "/m/large", f"{R}.tensor_model_parallel_size": "16"},
            "tensor_model_parallel_size=16: an engine that shares GPUs has those of one node, 8",
        ),
        ({f"{R}.n": "1"}, "algorithm.samplesPerPrompt=1: grpo needs a baseline"),
        ({"trainer.nnodes": "$NODES"}, "trainer.nnodes=${NODES}: line 11: the script does not set NODES"),
        (
            {"actor_rollout_ref.model.path": "google/gemma-2-2b-it"},
            "gemma-2-2b-it: no model family here trains it",
        ),
        ({"actor_rollout_ref.model.path": "Qwen/Qwen2.5-VL-7B-Instruct"}, "it reads images or sound"),
        (
            {"data.train_files": "/d/mixed/train.parquet"},
            "the reward of /d/mixed/train.parquet is not in the",
        ),
        ({"data.train_files": None}, "the configuration names no training data"),
        (
            {f"{A}.ppo_mini_batch_size": "100"},
            "ppo_mini_batch_size=100: must divide the batch of 256 prompts",
        ),
        (
            {"reward_model.enable": "True", "reward_model.model.path": "sfairXC/FsfairX-LLaMA3-RM-v0.1"},
            "a reward model must have the policy's tokenizer",
        ),
        (
            {"trainer.nnodes": "1", "actor_rollout_ref.model.path": "Qwen/Qwen3-235B-A22B"},
            "the planner refuses the job",
        ),
    ],
)
def test_what_would_train_something_else_is_an_error(changes: dict[str, str | None], message: str) -> None:
    with pytest.raises(ConvertError) as error:
        converted(changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"data.val_files": "test.parquet"}, "data.val_files=test.parquet: jobs do not validate"),
        (
            {"data.truncation": "left"},
            "data.truncation=left: prompts longer than data.promptLength are skipped",
        ),
        ({"data.shuffle": "False"}, "data.shuffle=False: epochs are shuffled: data.order"),
        ({f"{R}.name": "vllm"}, "rollout.name=vllm: engines are SGLang's"),
        ({f"{T}.num_layers": "4"}, "override_transformer_config.num_layers=4: "),
        ({f"{R}.max_num_seqs": "$SEQUENCES"}, "line 13: the script does not set SEQUENCES"),
        ({"some.new_option": "1"}, "some.new_option=1: no counterpart is known"),
    ],
)
def test_what_has_no_counterpart_is_reported_and_strictly_refused(
    changes: dict[str, str | None], line: str
) -> None:
    assert any(line in each for each in converted(changes).missing)
    with pytest.raises(ConvertError) as error:
        converted(changes, strict=True)
    assert line in str(error.value)


def test_every_option_is_in_the_report() -> None:
    done = converted({"data.val_files": "x", f"{A}.strategy": "fsdp"})
    report = "\n".join([*done.taken, *done.chosen, *done.missing])
    assert all(f"{name}=" in report for name in [*BASE, "data.val_files", f"{A}.strategy"])


def test_the_whole_configuration_is_read_from_yaml() -> None:
    text = """
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B, lora_rank: 0}
  actor: {_target_: verl.X, ppo_mini_batch_size: 64, optim: {lr: 1e-6}, use_kl_loss: true, kl_loss_coef: 2e-3}
  rollout: {n: 8, name: sglang, response_length: "${data.max_response_length}"}
data:
  train_files: "${oc.env:DATA,/d}/gsm8k/train.parquet"
  train_batch_size: 256
  max_prompt_length: 512
  max_response_length: 512
algorithm: {adv_estimator: grpo}
trainer: {nnodes: 1, n_gpus_per_node: 8, total_training_steps: null, experiment_name: My Run_1}
"""
    assert detect(text) is Framework.VERL
    done = convert(Framework.VERL, [text], Choices(), {})
    job = GRPOJobSpec.model_validate(done.manifest["spec"])
    assert job.algorithm.kl_ctrl.kl_coef == 0.002 and job.trainer.optimizer.lr == 1e-6
    assert job.data.train == "/data/gsm8k/train.parquet" and done.manifest["metadata"]["name"] == "my-run-1"


def test_configurations_that_hydra_would_add_are_named() -> None:
    text = "defaults: [ppo_trainer, mine, _self_]\nactor_rollout_ref: {model: {path: Qwen/Qwen3-8B}}\n"
    with pytest.raises(ConvertError, match=r"defaults: mine: it is not read: .* --cfg job"):
        convert(Framework.VERL, [text], Choices(), {})


def test_another_program_or_configuration_is_named() -> None:
    with pytest.raises(ConvertError, match=r"it runs recipe\.spin\.main_spin, whose algorithm no job has"):
        convert(Framework.VERL, ["python3 -m recipe.spin.main_spin a.b=1"], Choices(), {})
    text = script({}).replace("main_ppo ", "main_ppo --config-name=mine ")
    with pytest.raises(ConvertError, match=r"--config-name=mine holds further options: .* --cfg job"):
        convert(Framework.VERL, [text], Choices(), {})
    with pytest.raises(ConvertError, match="2 times"):
        convert(Framework.VERL, [script({}) + "\n" + script({})], Choices(), {})


def test_options_after_a_comment_are_reported() -> None:
    text = script({}) + " \\\n  # off \\\n  trainer.save_freq=3\n"
    done = convert(Framework.VERL, [text], Choices(), {})
    assert any(
        "line 14: trainer.save_freq=3: bash reads no options after a comment" in line for line in done.missing
    )
