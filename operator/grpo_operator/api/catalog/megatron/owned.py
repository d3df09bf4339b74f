"""Fields of Megatron-Core's configuration that ``spec.trainer.megatron`` may not set, with their remedies.

A test compares this table with everything that the trainer passes to Megatron-Core.
"""

_MODEL = "it belongs to the model's architecture, which config.json determines: remove it"
_STAGES = "grpo-operator distributes the layers: set spec.trainer.parallelism instead"
_PRECISION = "set spec.trainer.precision instead"
_LOADED = "every weight is loaded, none is initialized: remove it"
_KERNELS = "the kernels of the layers determine it: set spec.trainer.kernels instead"
_DISPATCHER = "set spec.trainer.moe.dispatcher instead"
_LOSS = "grpo-operator computes and scales the loss: remove it"
_INFERENCE = "it is for inference, and the engines generate: remove it"
_OVERLAP = "set spec.trainer.moe.overlapCommunication instead"
# What needs more than a field: Megatron-Core's own training script prepares it, ours does not.
_DELAYED = "weight gradients are computed with the others of their layer: remove it"
_BUFFERS = "the trainer creates no communication buffers of Transformer Engine: remove it"
_UNUSED = "nothing in the trainer reads it: remove it"
_MTP = "set spec.model.multiTokenPrediction instead"
_RECOMPUTE = "set spec.trainer.recompute instead"
_DETERMINISTIC = "set spec.trainer.deterministic instead"
_OFFLOAD = "set spec.trainer.offload instead"
_BALANCE = "set spec.trainer.moe.auxLossCoefficient instead"


def _parallelism(field: str) -> str:
    return f"set spec.trainer.parallelism.{field} instead"


# Remedy -> the fields, separated by spaces.
_GROUPS: dict[str, str] = {
    _parallelism("tensor"): "tensor_model_parallel_size sequence_parallel",
    _parallelism("pipeline"): "pipeline_model_parallel_size",
    _parallelism("virtualPipeline"): "virtual_pipeline_model_parallel_size",
    _parallelism("context"): "context_parallel_size hierarchical_context_parallel_sizes "
    "hybrid_context_parallel max_seqlen_per_dp_cp_rank",
    _parallelism("expert"): "expert_model_parallel_size",
    _parallelism("expertTensor"): "expert_tensor_parallel_size moe_extended_tp",
    _parallelism("layersInFirstStage"): "num_layers_in_first_pipeline_stage",
    _parallelism("layersInLastStage"): "num_layers_in_last_pipeline_stage",
    _STAGES: "pipeline_model_parallel_layout account_for_embedding_in_pipeline_split "
    "account_for_loss_in_pipeline_split",
    "the layout determines how stages exchange tensors: remove it": "batch_p2p_comm",
    _PRECISION: "params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype fp8 fp8_recipe "
    "fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo "
    "fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention fp4 fp4_recipe fp4_param "
    "fp4_quantizer_factory tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16 "
    "num_layers_at_end_in_bf16 activation_func_fp8_input_store moe_router_padding_for_fp8 "
    "moe_router_padding_for_quantization quant_recipe",
    "routers compute in fp32: remove it": "moe_router_dtype",
    "the softmax of attention is computed in fp32: remove it": "attention_softmax_in_fp32 "
    "apply_query_key_layer_scaling",
    _RECOMPUTE: "recompute_granularity recompute_method recompute_num_layers recompute_modules "
    "distribute_saved_activations moe_layer_recompute num_microbatches_with_partial_activation_checkpoints",
    _DETERMINISTIC: "deterministic_mode",
    _OFFLOAD: "cpu_offloading cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations "
    "cpu_offloading_weights cpu_offloading_double_buffering fine_grained_activation_offloading "
    "offload_modules",
    "set spec.trainer.moe.biasUpdateRate instead": "moe_router_bias_update_rate",
    _BALANCE: "moe_aux_loss_coeff moe_router_load_balancing_type",
    "set spec.algorithm.routingReplay instead": "moe_enable_routing_replay",
    _MTP: "mtp_num_layers mtp_loss_scaling_factor mtp_standalone",
    _DISPATCHER: "moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend",
    _KERNELS: "transformer_impl attention_backend moe_grouped_gemm moe_use_legacy_grouped_gemm "
    "moe_permute_fusion moe_router_fusion bias_activation_fusion bias_dropout_fusion masked_softmax_fusion "
    "apply_rope_fusion fused_single_qkv_rope use_fused_weighted_squared_relu gradient_accumulation_fusion "
    "persist_layer_norm memory_efficient_layer_norm use_te_activation_func use_kitchen use_kitchen_attention "
    "kitchen_attention_backend",
    _LOSS: "calculate_per_token_loss cross_entropy_loss_fusion cross_entropy_fusion_impl grad_scale_func "
    "finalize_model_grads_func",
    _LOADED: "init_method output_layer_init_method embedding_init_method init_method_std "
    "embedding_init_method_std perform_initialization use_cpu_initialization init_model_with_meta_device",
    _INFERENCE: "flash_decode cache_mla_latents inference_rng_tracker inference_sampling_seed "
    "inference_fuse_tp_communication use_inference_optimized_layers mlp_chunks_for_prefill symmetric_ar_type",
    _OVERLAP: "overlap_moe_expert_parallel_comm",
    _DELAYED: "delay_wgrad_compute ep_overlap_early_attn_memory_release",
    _BUFFERS: "tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs "
    "tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs "
    "tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend",
    _UNUSED: "async_tensor_model_parallel_allreduce barrier_with_L1_time log_max_attention_logit "
    "moe_hybridep_num_sms moe_per_layer_logging moe_token_dropping pipeline_model_parallel_comm_backend "
    "qk_clip qk_clip_alpha qk_clip_threshold",
    "RL computes the same log-probability twice, so there is no dropout: remove it": "hidden_dropout "
    "attention_dropout",
    # What the files of the weights were trained with, or what would need tensors that they do not have.
    _MODEL: "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
    "normalization layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm qk_l2_norm add_bias_linear "
    "add_qkv_bias gated_linear_unit activation_func activation_func_clamp_value glu_linear_offset "
    "apply_residual_connection_post_layernorm rotary_interleaved rotary_base rotary_percent "
    "rotary_scaling_factor rope_type original_max_position_embeddings beta_fast beta_slow mscale "
    "mscale_all_dim mrope_section no_rope_freq softmax_scale softmax_type window_size window_attn_skip_freq "
    "attention_output_gate multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim "
    "v_head_dim experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk "
    "dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim "
    "linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads num_moe_experts "
    "moe_ffn_hidden_size moe_layer_freq moe_latent_size moe_apply_probs_on_input moe_router_topk "
    "moe_router_num_groups moe_router_group_topk moe_router_topk_limited_devices moe_router_score_function "
    "moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_enable_expert_bias "
    "moe_shared_expert_intermediate_size moe_shared_expert_gate is_hybrid_model mamba_state_dim "
    "mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path heterogeneous_block_specs "
    "hetereogenous_dist_checkpoint",
}

OWNED: dict[str, str] = {name: remedy for remedy, names in _GROUPS.items() for name in names.split()}
