"""Options of verl for data, rewards and the model."""

from grpo_operator.convert.fields.data import paths
from grpo_operator.convert.remedies import (
    LORA,
    UNKNOWN,
    VALIDATION,
)
from grpo_operator.convert.rules import (
    Always,
    Fact,
    Missing,
    Refused,
    Table,
    Take,
    integer,
    optional,
    real,
    truth,
)
from grpo_operator.convert.verl.names import ACTOR, MODEL


def _rewards(functions: str, managers: str, models: str) -> Table:
    """Return the rules of rewards, whose sections have other names in later versions of verl."""
    return {
        f"{functions}path": Fact("reward_path", "reward.function", optional(str), text=True),
        f"{functions}name": Fact("reward_name", "reward.function", str),
        f"{functions}*": Missing("give the function default arguments"),
        f"{models}enable": Fact("reward_model_enabled", "reward.model", truth),
        f"{models}model.path": Fact("reward_model", "reward.model.path", str, text=True),
        f"{managers}reward_manager": Missing(
            "every response is scored by itself: see reward.function", ("naive", "dapo", None)
        ),
        f"{models}overlong_buffer.enable": Fact("overlong_enable", "algorithm.overlong", truth),
        f"{models}overlong_buffer.len": Fact("overlong_length", "algorithm.overlong.bufferLength", integer),
        f"{models}overlong_buffer.penalty_factor": Fact(
            "overlong_penalty", "algorithm.overlong.penalty", real
        ),
        f"{managers}reward_kwargs.overlong_buffer_cfg.enable": Fact(
            "overlong_enable", "algorithm.overlong", truth
        ),
        f"{managers}reward_kwargs.overlong_buffer_cfg.len": Fact(
            "overlong_length", "algorithm.overlong.bufferLength", integer
        ),
        f"{managers}reward_kwargs.overlong_buffer_cfg.penalty_factor": Fact(
            "overlong_penalty", "algorithm.overlong.penalty", real
        ),
        f"{managers}reward_kwargs.overlong_buffer_cfg.log": Always("metrics show it"),
        f"{managers}reward_kwargs.max_resp_len": Always("as data.responseLength"),
        f"{models}sandbox_fusion.*": Missing("reward.builtin: code runs programs in its own sandbox"),
        f"{models}*": Missing("a reward model runs on the trainer's ranks in their layout"),
    }


DATA: Table = {
    "data.train_files": Fact("files", "data.train", paths, text=True),
    "data.val_files": Missing(VALIDATION),
    "data.val_batch_size": Missing(VALIDATION),
    "data.train_batch_size": Take("data.trainBatchSize", integer),
    "data.gen_batch_size": Missing("more prompts are generated one by one as filterGroups needs them"),
    "data.max_prompt_length": Take("data.promptLength", integer),
    "data.max_response_length": Take("data.responseLength", integer),
    "data.prompt_key": Take("data.promptKey", str),
    "data.reward_fn_key": Always("data_source is passed to the reward function", ("data_source",)),
    "data.truncation": Missing("prompts longer than data.promptLength are skipped, not cut", ("error", None)),
    "data.filter_overlong_prompts": Always("longer prompts are skipped"),
    "data.filter_overlong_prompts_workers": Always("prompts are tokenized once and cached"),
    "data.shuffle": Missing("epochs are shuffled: data.order names a function that keeps the order", (True,)),
    "data.seed": Take("seed", optional(integer)),
    "data.return_raw_chat": Always("the chat template is applied here"),
    "data.return_raw_input_ids": Always("prompts are token ids"),
    "data.image_key": Refused("jobs train text models only", ("images", None, "null")),
    "data.video_key": Missing("jobs train text models only", ("videos", None, "null")),
    "data.apply_chat_template_kwargs.*": Fact("chat", "data.chatTemplateKwargs"),
    "data.apply_chat_template_kwargs": Missing("set data.chatTemplateKwargs", (None, {}, "{}")),
    "data.custom_cls.*": Missing("data.filter and data.order select and sort rows", (None, "null", "")),
    "data.sampler.*": Missing("data.order names a function that sorts rows", (None, "null", "")),
    "data.trust_remote_code": Missing("code of model directories is not run: files must need none"),
    "data.train_max_samples": Missing("data.filter selects rows", (-1, None)),
    "data.dataloader_num_workers": Always("prompts are read once"),
    "data.tokenizer": Missing("the tokenizer is that of the model", (None, "null")),
    **_rewards("custom_reward_function.", "reward_model.", "reward_model."),
    **_rewards("reward.custom_reward_function.", "reward.", "reward.reward_model."),
    "reward.reward_model.model_path": Fact("reward_model", "reward.model.path", str, text=True),
    "reward.reward_manager.name": Missing(
        "every response is scored by itself: see reward.function", ("naive", "dapo", None)
    ),
    "reward.reward_manager.*": Always("every response is scored by itself"),
    "reward.*": Refused(UNKNOWN),
    "reward_manager.*": Missing("every response is scored by itself: see reward.function"),
}
MODEL_OPTIONS: Table = {
    f"{MODEL}.path": Fact("model", "model.path", str, text=True),
    f"{MODEL}.lora_rank": Refused(LORA),
    f"{MODEL}.lora.rank": Refused(LORA),
    f"{MODEL}.lora_adapter_path": Refused(LORA),
    f"{MODEL}.lora.*": Missing("belongs to LoRA"),
    f"{MODEL}.lora_alpha": Missing("belongs to LoRA"),
    f"{MODEL}.target_modules": Missing("belongs to LoRA", ("all-linear", None)),
    f"{MODEL}.exclude_modules": Missing("belongs to LoRA"),
    f"{MODEL}.use_remove_padding": Always("sequences are packed with trainer.maxTokensPerGpu"),
    f"{MODEL}.use_fused_kernels": Always("trainer.kernels chooses the kernels"),
    f"{MODEL}.fused_kernel_options.*": Always("trainer.kernels chooses the kernels"),
    f"{MODEL}.enable_gradient_checkpointing": Take(
        "trainer.recompute", lambda value: "full" if truth(value) else "none"
    ),
    f"{MODEL}.enable_activation_offload": Missing("trainer.offload.activations names modules"),
    f"{MODEL}.trust_remote_code": Missing("code of model directories is not run: files must need none"),
    f"{MODEL}.override_config.*": Missing("change config.json in the model's directory"),
    f"{MODEL}.mtp.enable": Take("model.multiTokenPrediction", truth),
    f"{MODEL}.mtp.*": Missing("the MTP layer learns from the responses and leaves the policy as it is"),
    f"{MODEL}.use_shm": Always("pods read the volume"),
    f"{MODEL}.torch_dtype": Missing("weights are bf16, main weights fp32", ("bfloat16", None)),
    f"{MODEL}.*": Missing("the model's directory decides about it"),
    f"{ACTOR}.freeze_vision_tower": Refused("jobs train text models only"),
}
