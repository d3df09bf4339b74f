"""Fields of the training that several options decide about together: KL, batches, optimizer, steps."""

from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec
from grpo_operator.convert.choices import Choices
from grpo_operator.convert.draft import Draft

_STEPS = 500  # where nothing says how long a job trains


def place_kl(draft: Draft) -> None:
    """Set the KL term: in the loss, in the reward, or both with one coefficient."""
    in_loss, in_reward = draft.fact("use_kl_loss", False), draft.fact("use_kl_in_reward", False)
    loss, reward = draft.fact("kl_loss_coef", 0.001), draft.fact("kl_reward_coef", 0.001)
    if in_loss and in_reward and loss != reward:
        draft.refuse(
            "kl_reward_coef", f"klCtrl.klCoef is one coefficient: set it to that of the loss, {loss}"
        )
    draft.take("algorithm.useKlLoss", in_loss)
    draft.take("algorithm.useKlInReward", in_reward)
    if in_loss or in_reward:
        draft.take("algorithm.klCtrl.klCoef", loss if in_loss else reward)
    if not in_reward and draft.fields.get("algorithm.klCtrl.type") == "adaptive":
        reason = "the source adapts only the coefficient of the reward, which it does not use"
        draft.choose("algorithm.klCtrl.type", "fixed", reason)


def place_group(draft: Draft) -> None:
    """Check the group size, which one estimator's baseline needs."""
    estimator = draft.fields.get("algorithm.advEstimator", "gae")
    size = draft.fields.get("algorithm.samplesPerPrompt", 1)
    if size < 2 and estimator not in ("gae", "reinforce_plus_plus"):
        draft.errors.append(
            f"algorithm.samplesPerPrompt={size}: {estimator} needs a baseline of at least 2 samples: "
            "set the source's samples per prompt to 2 or more"
        )
    if estimator == "gae":
        draft.fields.setdefault("algorithm.critic.lam", 1.0)
    else:
        for name in [name for name in draft.fields if name.startswith("algorithm.critic.")]:
            del draft.fields[name]
    if draft.fields.get("algorithm.policyLoss") == "gspo":
        mode = draft.fields.get("algorithm.lossAggMode", AlgorithmSpec().loss_agg_mode)
        if mode != "seq-mean-token-mean":
            reason = "gspo weights whole sequences, in the source too whatever its aggregation is"
            draft.choose("algorithm.lossAggMode", "seq-mean-token-mean", reason)


def place_batches(draft: Draft) -> None:
    """Set mini-batch, micro-batch and tokens of a forward pass."""
    batch = int(draft.fields.get("data.trainBatchSize", 0))
    samples = int(draft.fields.get("algorithm.samplesPerPrompt", 1))
    mini = draft.fact("mini_batch")
    if (of_samples := draft.fact("mini_batch_samples")) is not None:
        if of_samples % samples:
            draft.refuse("mini_batch_samples", f"must be a multiple of {samples} samples per prompt")
        mini = max(1, of_samples // samples)
    if (parts := draft.fact("updates_per_step")) is not None:
        mini = max(1, batch // parts)
    if mini is None or mini > batch:
        reason = "one optimizer step in each training step" if mini is None else f"{mini} exceeds the batch"
        draft.choose("trainer.miniBatchSize", batch, reason)
        mini = batch
    draft.take("trainer.miniBatchSize", mini)
    if mini and batch % mini:
        draft.refuse("mini_batch", f"must divide the batch of {batch} prompts")
    _forward_passes(draft)


def _forward_passes(draft: Draft) -> None:
    if not draft.fact("packed", False):
        draft.take("trainer.microBatchSizePerGpu", draft.fact("micro_batch", 1))
        if (without_gradients := draft.fact("log_prob_micro_batch")) is not None:
            draft.take("trainer.logProbMicroBatchSizePerGpu", without_gradients)
        return
    longest = int(draft.fields["data.promptLength"]) + int(draft.fields["data.responseLength"])
    needed = -(-longest // draft.fact("context", 1))
    for fact, field in (("max_tokens", "maxTokensPerGpu"), ("log_prob_tokens", "logProbMaxTokensPerGpu")):
        tokens = draft.fact(fact, 16384 if fact == "max_tokens" else None)
        if tokens is not None and tokens < needed:
            draft.choose(f"trainer.{field}", needed, f"{tokens} cannot hold the longest sample")
        elif tokens is not None:
            draft.take(f"trainer.{field}", tokens)


def place_steps(draft: Draft, choices: Choices) -> None:
    """Set totalSteps, the warm-up and the interval of checkpoints."""
    batch = int(draft.fields.get("data.trainBatchSize", 0)) or 1
    steps, epochs = draft.fact("steps"), draft.fact("epochs")
    if choices.steps:
        steps = choices.steps
        draft.taken.append(f"--steps={steps} -> totalSteps")
        draft.take("totalSteps", steps)
    elif steps and steps > 0:
        draft.take("totalSteps", steps)
    elif choices.rows and epochs:
        steps = max(1, choices.rows // batch * epochs)
        draft.choose("totalSteps", steps, f"{epochs} epochs of {choices.rows} rows, {batch} of them per step")
    else:
        said = (
            f"the source says {epochs} epochs, and not of how many rows" if epochs else "the source has none"
        )
        draft.choose("totalSteps", _STEPS, f"{said}: add --rows N or --steps N")
    _warm_up(draft)
    every = draft.fact("save_every")
    if every is None or every < 1:
        draft.choose("checkpoint.everySteps", 10, "a job needs checkpoints to go on after a fault")
    else:
        draft.take("checkpoint.everySteps", every)
    draft.choose("checkpoint.store", {"pvc": "grpo-checkpoints"}, "create this claim, or name another store")


def _warm_up(draft: Draft) -> None:
    """Set the warm-up, which a job counts in optimizer steps."""
    batch = int(draft.fields.get("data.trainBatchSize", 1))
    updates = max(1, batch // max(1, int(draft.fields.get("trainer.miniBatchSize", batch) or 1)))
    for prefix, field in (("", "trainer.optimizer"), ("critic_", "algorithm.critic.optimizer")):
        if prefix and draft.fields.get("algorithm.advEstimator") != "gae":
            continue
        steps, ratio = draft.fact(f"{prefix}warmup_steps", -1), draft.fact(f"{prefix}warmup_ratio", 0)
        if steps > 0 and updates > 1 and draft.fact("schedule_by_training_step", False):
            reason = f"{steps} training steps of {updates} optimizer steps each"
            draft.choose(f"{field}.lrWarmupSteps", steps * updates, reason)
        elif steps > 0:
            draft.take(f"{field}.lrWarmupSteps", steps)
        elif ratio > 0:
            counted = round(ratio * draft.fields["totalSteps"] * updates)
            draft.choose(f"{field}.lrWarmupSteps", counted, f"{ratio} of the optimizer steps in totalSteps")
