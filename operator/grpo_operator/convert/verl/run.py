"""Options of verl for engines and for the run."""

from grpo_operator.convert.remedies import ENGINES, NO_PROFILE, PROFILES, TURNS
from grpo_operator.convert.rules import (
    Always,
    Fact,
    Missing,
    Refused,
    Table,
    Take,
    choice,
    integer,
    optional,
    real,
    same,
    truth,
)
from grpo_operator.convert.verl.names import ROLLOUT

ENGINES_OF_VERL: Table = {
    f"{ROLLOUT}.name": Missing(
        "engines are SGLang's: samples are drawn from the same distribution", ("sglang",)
    ),
    f"{ROLLOUT}.mode": Always("engines are servers"),
    f"{ROLLOUT}.tensor_model_parallel_size": Fact("engine_gpus", "rollout.template.engine", integer),
    f"{ROLLOUT}.expert_parallel_size": Fact("engine_expert", "engine.expertParallel", integer),
    f"{ROLLOUT}.data_parallel_size": Missing("rollout.template.replicas counts engines", (1,)),
    f"{ROLLOUT}.gpu_memory_utilization": Fact("memory_fraction", "engine.memoryFraction", real),
    f"{ROLLOUT}.max_num_seqs": Take("rollout.template.engine.maxRunningRequests", integer),
    f"{ROLLOUT}.max_model_len": Always("engine.contextLength: prompt and response"),
    f"{ROLLOUT}.prompt_length": Always("as data.promptLength"),
    f"{ROLLOUT}.response_length": Always("as data.responseLength"),
    f"{ROLLOUT}.dtype": Take("rollout.template.engine.dtype", str),
    f"{ROLLOUT}.quantization": Take(
        "rollout.template.engine.quantization", optional(choice(fp8="fp8-block128"))
    ),
    f"{ROLLOUT}.over_sample_rate": Take("rollout.overSampleRate", real),
    f"{ROLLOUT}.free_cache_engine": Always("mode: colocated releases the engines' memory"),
    f"{ROLLOUT}.multi_stage_wake_up": Always("mode: colocated releases the engines' memory"),
    f"{ROLLOUT}.load_format": Always("engines get the trainers' weights"),
    f"{ROLLOUT}.layered_summon": Always("weights move bucket by bucket"),
    f"{ROLLOUT}.enable_chunked_prefill": Always("SGLang does so"),
    f"{ROLLOUT}.enable_prefix_caching": Always("SGLang does so"),
    f"{ROLLOUT}.skip_tokenizer_init": Always("prompts are token ids"),
    f"{ROLLOUT}.disable_log_stats": Always("metrics show engines"),
    f"{ROLLOUT}.prometheus.*": Always("the Helm chart scrapes jobs"),
    f"{ROLLOUT}.val_kwargs.n": Fact(
        "validation_samples", "validation.samplesPerPrompt", integer, beside=True
    ),
    f"{ROLLOUT}.val_kwargs.do_sample": Fact(
        "validation_sampling", "validation.temperature", truth, beside=True
    ),
    f"{ROLLOUT}.val_kwargs.temperature": Fact(
        "validation_temperature", "validation.temperature", real, beside=True
    ),
    f"{ROLLOUT}.val_kwargs.*": Missing("a validation has algorithm.topP and topK"),
    f"{ROLLOUT}.multi_turn.enable": Refused(TURNS),
    f"{ROLLOUT}.multi_turn.tool_config_path": Refused(TURNS),
    f"{ROLLOUT}.multi_turn.interaction_config_path": Refused(TURNS),
    f"{ROLLOUT}.multi_turn.*": Missing(TURNS),
    f"{ROLLOUT}.agent.default_agent_loop": Refused(TURNS, ("single_turn_agent", None)),
    f"{ROLLOUT}.agent.*": Always("the controller sends the requests", None),
    f"{ROLLOUT}.engine_kwargs.*": Missing(ENGINES),
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": Take(
        "weightSync.bucketMegabytes", integer
    ),
    f"{ROLLOUT}.update_weights_bucket_megabytes": Take("weightSync.bucketMegabytes", integer),
    f"{ROLLOUT}.trace.*": Missing("observability.samples writes every sample"),
    f"{ROLLOUT}.profiler.*": Missing(PROFILES, (*NO_PROFILE, [])),
    f"{ROLLOUT}.*": Missing(ENGINES),
}
RUN: Table = {
    "trainer.nnodes": Fact("nodes", "trainer.nodes", integer),
    "trainer.n_gpus_per_node": Fact("gpus_per_node", "trainer.gpusPerNode", integer),
    "trainer.total_epochs": Fact("epochs", "totalSteps", integer),
    "trainer.total_training_steps": Fact("steps", "totalSteps", optional(integer)),
    "trainer.save_freq": Fact("save_every", "checkpoint.everySteps", integer),
    "trainer.max_actor_ckpt_to_keep": Take("checkpoint.keep", optional(integer)),
    "trainer.max_critic_ckpt_to_keep": Always("as checkpoint.keep"),
    "trainer.default_local_dir": Always("checkpoint.store has a folder for each job"),
    "trainer.default_hdfs_dir": Missing("set checkpoint.store"),
    "trainer.resume_mode": Missing("set checkpoint.resumeFrom", ("auto", "disable")),
    "trainer.resume_from_path": Missing("checkpoints of verl cannot be read: export the weights"),
    "trainer.project_name": Fact("wandb_project", "observability.wandb.project", str, text=True),
    "trainer.experiment_name": Fact("name", "metadata.name", str, text=True),
    "trainer.logger": Fact("loggers", "observability", same),
    "trainer.test_freq": Fact("validation_every", "validation.everySteps", optional(integer), beside=True),
    "trainer.val_before_train": Fact("validation_first", "validation.beforeTraining", truth, beside=True),
    "trainer.val_only": Refused("jobs train: score an export with another tool", (False,)),
    "trainer.log_val_generations": Always("observability.samples.validationPrompts writes responses"),
    "trainer.validation_data_dir": Always("observability.samples.validationPrompts writes responses"),
    "trainer.rollout_data_dir": Always("observability.samples writes every sample"),
    "trainer.balance_batch": Always("ranks get about the same number of tokens", (True, False)),
    "trainer.device": Missing("GPUs are NVIDIA's", ("cuda", None)),
    "trainer.use_legacy_worker_impl": Always("the trainer is Megatron-Core"),
    "trainer.*": Missing("no field here: see docs/reference/grpojob.md"),
    "global_profiler.*": Missing(PROFILES, (*NO_PROFILE, [])),
    "ray_kwargs.*": Missing("KubeRay starts Ray: see spec.head"),
    "transfer_queue.*": Missing("samples go through Ray's object store", (False,)),
}
