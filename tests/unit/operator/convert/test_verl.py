"""Scripts of verl become jobs, or an error says why not."""

from collections.abc import Mapping
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.convert.choices import Choices
from grpo_operator.convert.convert import Conversion, convert
from grpo_operator.convert.errors import ConvertError
from grpo_operator.convert.reading.readers import detect
from grpo_operator.convert.reading.source import Framework

BASE = {
    "algorithm.adv_estimator": "grpo",
    "data.train_files": "$HOME/data/gsm8k/train.parquet",
    "data.train_batch_size": "256",
    "data.max_prompt_length": "512",
    "data.max_response_length": "1024",
    "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "64",
    "actor_rollout_ref.rollout.n": "8",
    "trainer.n_gpus_per_node": "8",
    "trainer.nnodes": "2",
    "trainer.total_training_steps": "100",
}
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
T = f"+{A}.megatron.override_transformer_config"


def script(changes: Mapping[str, str | None]) -> str:
    options = {name: value for name, value in {**BASE, **changes}.items() if value is not None}
    return " \\\n    ".join(["python3 -m verl.trainer.main_ppo", *(f"{n}={v}" for n, v in options.items())])


def converted(
    changes: Mapping[str, str | None] | None = None, strict: bool = False, **choices: Any
) -> Conversion:
    return convert(Framework.VERL, [script(changes or {})], Choices(**choices), {}, strict=strict)


def spec(changes: Mapping[str, str | None] | None = None, **choices: Any) -> GRPOJobSpec:
    return GRPOJobSpec.model_validate(converted(changes, **choices).manifest["spec"])


def value(job: GRPOJobSpec, path: str) -> Any:
    found: Any = job.wire()
    for name in path.split("."):
        found = found[name]
    return found


@pytest.mark.parametrize(
    ("changes", "path", "expected"),
    [
        ({}, "algorithm.samplesPerPrompt", 8),
        ({}, "algorithm.useKlLoss", False),
        ({}, "trainer.optimizer.adamBeta2", 0.999),
        ({}, "data.answerKey", "reward_model.ground_truth"),
        ({}, "data.train", "/data/gsm8k/train.parquet"),
        ({}, "model.volume", {"mountPath": "/models/Qwen3-8B", "uri": "hf://Qwen/Qwen3-8B"}),
        ({}, "model.architecture", "qwen3-8b"),
        ({}, "mode", "colocated"),
        ({}, "trainer.nodes", 2),
        ({}, "reward.builtin", "math"),
        ({"algorithm.adv_estimator": "rloo_vectorized"}, "algorithm.advEstimator", "rloo"),
        ({"algorithm.norm_adv_by_std_in_grpo": "False"}, "algorithm.normAdvByStd", False),
        ({f"{A}.policy_loss.loss_mode": "gspo"}, "algorithm.policyLoss", "gspo"),
        ({f"{A}.policy_loss.loss_mode": "gspo"}, "algorithm.lossAggMode", "seq-mean-token-mean"),
        ({f"{A}.clip_ratio": "0.1"}, "algorithm.clipRatioHigh", 0.1),
        ({f"{A}.clip_ratio": "0.1", f"{A}.clip_ratio_high": "0.3"}, "algorithm.clipRatioHigh", 0.3),
        ({f"{A}.use_kl_loss": "True", f"{A}.kl_loss_coef": "1e-2"}, "algorithm.klCtrl.klCoef", 0.01),
        (
            {"algorithm.use_kl_in_reward": "True", "algorithm.kl_ctrl.kl_coef": "0.2"},
            "algorithm.klCtrl.klCoef",
            0.2,
        ),
        ({f"{A}.kl_loss_type": "low_var_kl"}, "algorithm.klLossType", "k3"),
        ({f"{A}.kl_loss_type": "mse"}, "algorithm.klLossType", "k2"),
        ({"algorithm.filter_groups.enable": "True"}, "algorithm.filterGroups.maxNumGenBatches", 1000),
        (
            {"algorithm.filter_groups.enable": "True", "algorithm.filter_groups.max_num_gen_batches": "4"},
            "algorithm.filterGroups.maxNumGenBatches",
            4,
        ),
        ({"algorithm.rollout_correction.rollout_is": "token"}, "algorithm.rolloutCorrection.tisCap", 2.0),
        ({f"{A}.tis_imp_ratio_cap": "3"}, "algorithm.rolloutCorrection.tisCap", 3.0),
        (
            {
                "reward.reward_kwargs.overlong_buffer_cfg.enable": "True",
                "reward.reward_kwargs.overlong_buffer_cfg.len": "64",
            },
            "algorithm.overlong.bufferLength",
            64,
        ),
        ({f"{R}.top_k": "0"}, "algorithm.topK", -1),
        (
            {"+data.apply_chat_template_kwargs.enable_thinking": "False"},
            "data.chatTemplateKwargs",
            {"enable_thinking": "false"},
        ),
        ({f"{A}.optim.lr": "3e-7"}, "trainer.optimizer.lr", 3e-7),
        ({f"{A}.optim.lr_warmup_steps": "10"}, "trainer.optimizer.lrWarmupSteps", 40),
        ({f"{A}.router_replay.mode": "R3"}, "algorithm.routingReplay", True),
        ({f"{A}.optim.lr_warmup_steps_ratio": "0.1"}, "trainer.optimizer.lrWarmupSteps", 40),
        (
            {f"{A}.use_dynamic_bsz": "True", f"{A}.ppo_max_token_len_per_gpu": "9000"},
            "trainer.maxTokensPerGpu",
            9000,
        ),
        (
            {f"{A}.use_dynamic_bsz": "True", f"{A}.ppo_max_token_len_per_gpu": "900"},
            "trainer.maxTokensPerGpu",
            1536,
        ),
        ({f"{A}.megatron.tensor_model_parallel_size": "4"}, "trainer.parallelism.tensor", 4),
        (
            {f"{T}.recompute_granularity": "selective", f"{T}.recompute_modules": "[mlp]"},
            "trainer.recomputeModules",
            ["mlp"],
        ),
        ({f"{T}.moe_shared_expert_overlap": "True"}, "trainer.megatron.moe_shared_expert_overlap", True),
        ({f"{R}.gpu_memory_utilization": "0.9"}, "rollout.template.engine.memoryFraction", 0.85),
        (
            {"trainer.logger": "[console,wandb]", "trainer.project_name": "mine"},
            "observability.wandb.project",
            "mine",
        ),
        ({"trainer.save_freq": "-1"}, "checkpoint.everySteps", 10),
        (
            {"actor_rollout_ref.model.path": "$HOME/models/Qwen2-7B"},
            "model.volume",
            {"mountPath": "/models", "pvc": "models"},
        ),
        (
            {"actor_rollout_ref.model.path": "Qwen/Qwen2-7B"},
            "rollout.template.engine.attentionDataParallel",
            4,
        ),
        (
            {"data.train_files": "\"['/a/gsm8k/train.parquet', '/a/math/train.parquet']\""},
            "data.train",
            "/data/*/train.parquet",
        ),
        (
            {"custom_reward_function.path": "rewards/mine.py", "custom_reward_function.name": "judge"},
            "reward.function",
            "/data/mine.py:judge",
        ),
    ],
)
def test_an_option_becomes_a_field(changes: dict[str, str | None], path: str, expected: Any) -> None:
    assert value(spec(changes), path) == expected


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


def test_ppo_has_a_critic() -> None:
    changes = {
        "algorithm.adv_estimator": "gae",
        f"{R}.n": "1",
        "critic.optim.lr": "2e-5",
        "algorithm.lam": "0.9",
    }
    critic = spec({**changes, "trainer.critic_warmup": "3"}).algorithm.critic
    assert critic is not None
    assert (critic.optimizer.lr, critic.lam, critic.warmup_steps) == (2e-5, 0.9, 3)
    assert critic.optimizer.adam_beta2 == 0.999
    done = converted({**changes, "critic.model.path": "Qwen/Qwen3-4B"})
    assert any("the critic starts from the policy's weights" in line for line in done.missing)


def test_the_user_decides_about_the_reward() -> None:
    unknown: dict[str, str | None] = {"data.train_files": "/d/mixed/train.parquet"}
    assert value(spec(unknown, reward="code"), "reward.builtin") == "code"
    assert value(spec(unknown, reward="/data/mine.py:score"), "reward.function") == "/data/mine.py:score"
    assert value(spec(unknown, reward="http://judge:80"), "reward.url") == "http://judge:80"


def test_a_layer_of_experts_recomputes_its_parts_too() -> None:
    modules = f"{T}.recompute_modules"
    unplanned = {"actor_rollout_ref.model.path": "moonshotai/Moonlight-16B-A3B"}
    done = spec({**unplanned, f"{T}.recompute_granularity": "selective", modules: "[moe_act,moe,mlp]"})
    assert value(done, "trainer.recomputeModules") == ["moe", "mlp"]


def test_engines_get_nodes_of_their_own() -> None:
    job = spec({f"{R}.tensor_model_parallel_size": "4"}, rollout_nodes=1)
    template = job.rollout.template
    assert template is not None and job.mode == "static" and job.trainer.nodes == 1
    assert (template.replicas, template.engine.tensor_parallel, template.engine.gpus_per_node) == (2, 4, 4)
    with pytest.raises(ConvertError, match="--rollout-nodes=2: there are 2 nodes in all"):
        converted(rollout_nodes=2)
    assert spec(rollout_nodes=2, nodes=6).trainer.nodes == 4


def test_epochs_become_steps_when_the_rows_are_known() -> None:
    epochs: dict[str, str | None] = {"trainer.total_training_steps": None, "trainer.total_epochs": "3"}
    assert spec(epochs, rows=7473).total_steps == 7473 // 256 * 3
    assert any("the source says 3 epochs" in line for line in converted(epochs).chosen)
    assert spec(epochs, steps=9).total_steps == 9


def test_a_layout_that_does_not_fit_is_left_to_the_planner() -> None:
    sizes: dict[str, str | None] = {f"{A}.megatron.pipeline_model_parallel_size": "16"}
    done = converted(sizes)
    assert done.manifest["spec"]["trainer"]["parallelism"] == {"auto": True}
    assert any("the source's sizes do not fit: " in line for line in done.chosen)


def test_layers_are_counted_with_embedding_and_loss() -> None:
    changes = {
        "actor_rollout_ref.model.path": "Qwen/Qwen3-235B-A22B",
        "trainer.nnodes": "16",
        f"{R}.gpu_memory_utilization": "0.85",
        f"{A}.megatron.pipeline_model_parallel_size": "8",
        f"{A}.megatron.tensor_model_parallel_size": "4",
        f"{A}.megatron.expert_model_parallel_size": "16",
        f"{A}.megatron.expert_tensor_parallel_size": "1",
        f"{T}.account_for_embedding_in_pipeline_split": "True",
        f"{T}.account_for_loss_in_pipeline_split": "True",
    }
    sizes = spec(changes).trainer.parallelism
    assert (sizes.layers_in_first_stage, sizes.layers_in_last_stage) == (11, 11)


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


def test_an_adaptive_coefficient_is_that_of_the_reward() -> None:
    adaptive: dict[str, str | None] = {"algorithm.kl_ctrl.type": "adaptive", f"{A}.use_kl_loss": "True"}
    assert value(spec(adaptive), "algorithm.klCtrl.type") == "fixed"
    adaptive["algorithm.use_kl_in_reward"] = "True"
    assert value(spec(adaptive), "algorithm.klCtrl.type") == "adaptive"


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
