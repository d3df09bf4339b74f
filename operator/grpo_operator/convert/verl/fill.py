"""verl: its options, its defaults, and what follows from them."""

from typing import Any

from grpo_operator.convert.draft import Draft
from grpo_operator.convert.fields.finish import chat_variables
from grpo_operator.convert.reading.source import Source
from grpo_operator.convert.rules import Table
from grpo_operator.convert.verl.algorithm import ALGORITHM, CRITIC_OPTIONS
from grpo_operator.convert.verl.data import DATA, MODEL_OPTIONS
from grpo_operator.convert.verl.names import ACTOR, CRITIC, ROLLOUT, TRANSFORMER
from grpo_operator.convert.verl.run import ENGINES_OF_VERL, RUN
from grpo_operator.convert.verl.trainer import TRAINER

TABLE: Table = {**ALGORITHM, **CRITIC_OPTIONS, **DATA, **MODEL_OPTIONS, **TRAINER, **ENGINES_OF_VERL, **RUN}
# What verl does where a configuration is silent, if jobs do something else then.
DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.max_num_seqs": 256,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.optim.betas": [0.9, 0.999],
    "trainer.total_epochs": 30,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}
CRITIC_DEFAULTS: dict[str, Any] = {f"{CRITIC}.optim.betas": [0.9, 0.999]}
_CHAT = "data.apply_chat_template_kwargs."


def fill(draft: Draft, source: Source) -> None:
    """Take the options of verl over."""
    options = [option for option in source.options if not option.name.startswith(_CHAT)]
    for option in options:
        name = option.name.removeprefix(f"{TRANSFORMER}.")
        if name != option.name and option.name not in TABLE and option.value is not None:
            draft.megatron(option, name)
        else:
            draft.read([option], TABLE)
    draft.facts["schedule_by_training_step"] = True
    draft.assume(DEFAULTS, source, TABLE, "verl")
    if draft.fields.get("algorithm.advEstimator") == "gae":
        draft.assume(CRITIC_DEFAULTS, source, TABLE, "verl")
        _critic(draft)
        draft.take("algorithm.critic.warmupSteps", draft.fact("critic_warmup", 0))
    elif draft.fact("critic_warmup", 0) > 0:
        draft.refuse("critic_warmup", "without a critic the policy would only wait: write 0")
    chat_variables(draft, source, _CHAT)
    draft.choose("data.answerKey", "reward_model.ground_truth", "the column of the answers in verl's files")


def _critic(draft: Draft) -> None:
    """Report a critic that starts from other weights than the policy's, as a job's always does."""
    model, policy = draft.fact("critic_model"), draft.fact("model")
    if model is not None and model != policy:
        draft.lacks("critic_model", f"the critic starts from the policy's weights, {policy}")
    batch = draft.fact("critic_mini_batch")
    if batch is not None and batch != draft.fact("mini_batch"):
        draft.lacks("critic_mini_batch", "the critic has the policy's mini-batches")
