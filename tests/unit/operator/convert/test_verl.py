"""Options of verl become fields of a job."""

from typing import Any

import pytest

from grpo_operator.convert.errors import ConvertError
from support.verl_scripts import A, R, T, converted, spec, value


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
        (
            {"trainer.logger": "[console,trackio]", "trainer.project_name": "mine"},
            "observability.trackio.project",
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


def test_a_critic_without_a_learning_rate_keeps_verls() -> None:
    changes: dict[str, str | None] = {"algorithm.adv_estimator": "gae", f"{R}.n": "1"}
    critic = spec({**changes, "critic.optim.weight_decay": "0.1"}).algorithm.critic
    assert critic is not None
    assert (critic.optimizer.lr, critic.optimizer.weight_decay) == (1e-5, 0.1)


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


def test_an_adaptive_coefficient_is_that_of_the_reward() -> None:
    adaptive: dict[str, str | None] = {"algorithm.kl_ctrl.type": "adaptive", f"{A}.use_kl_loss": "True"}
    assert value(spec(adaptive), "algorithm.klCtrl.type") == "fixed"
    adaptive["algorithm.use_kl_in_reward"] = "True"
    assert value(spec(adaptive), "algorithm.klCtrl.type") == "adaptive"
