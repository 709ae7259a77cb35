"""The keys of the three config styles: required, fixed, ignored, and their other names."""

from __future__ import annotations

REQUIRED: dict[str, tuple[str, ...]] = {
    "vocab_size": (),
    "hidden_size": ("dim",),
    "num_hidden_layers": ("n_layers",),
    "num_attention_heads": ("n_heads",),
    "head_dim": (),
    "q_lora_rank": (),
    "o_groups": (),
    "o_lora_rank": (),
    "sliding_window": ("window_size",),
    "index_n_heads": (),
    "index_head_dim": (),
    "index_topk": (),
    "n_routed_experts": (),
    "num_experts_per_tok": ("n_activated_experts",),
    "moe_intermediate_size": ("moe_inter_dim",),
    "routed_scaling_factor": ("route_scale",),
    "swiglu_limit": (),
    "hc_mult": (),
    "hc_sinkhorn_iters": (),
    "hc_eps": (),
    "rms_norm_eps": ("norm_eps",),
}
"""Plain fields that a file must state, with the official argument names of some."""

FIXED: dict[str, tuple[tuple[object, ...], str]] = {
    "model_type": (("deepseek_v4",), "another architecture"),
    "attention_bias": ((False,), "no layer has a bias"),
    "mlp_bias": ((False,), "no layer has a bias"),
    "hidden_act": (("silu",), "the experts are SwiGLU"),
    "scoring_func": (("sqrtsoftplus",), "the router's activation"),
    "score_func": (("sqrtsoftplus",), "the router's activation"),
    "topk_method": (("noaux_tc",), "the bias acts on the selection only"),
    "norm_topk_prob": ((True,), "expert weights are always normalised"),
    "n_shared_experts": ((1,), "one shared expert"),
    "num_key_value_heads": ((1,), "one vector is key and value of all heads"),
    "tie_word_embeddings": ((False,), "embedding and head are two tensors"),
    "scale_fmt": (("ue8m0",), "scales are powers of two"),
    "quantization_config.quant_method": (("fp8",), "the stored weight format"),
    "quantization_config.fmt": (("e4m3",), "the stored weight format"),
    "quantization_config.activation_scheme": (("dynamic",), "scales are computed, not stored"),
    "quantization_config.scale_fmt": (("ue8m0",), "scales are powers of two"),
    "quantization_config.weight_block_size": (([128, 128],), "the stored weight format"),
    "rope_parameters.main.rope_type": (("default",), "sliding layers have no YaRN"),
    "rope_parameters.main.type": (("default",), "sliding layers have no YaRN"),
    "rope_parameters.compress.attention_factor": ((1.0,), "cos and sin are not scaled"),
    "rope_parameters.attention_factor": ((1.0,), "cos and sin are not scaled"),
    "rope_scaling.attention_factor": ((1.0,), "cos and sin are not scaled"),
}
"""Keys that may be absent and have one supported value: another would change the computation."""

IGNORED = {
    "architectures": "the class name of another library",
    "auto_map": "the class name of another library",
    "_name_or_path": "where another library loaded it from",
    "transformers_version": "who wrote the file",
    "use_cache": "there is always a cache",
    "attention_dropout": "training",
    "initializer_range": "training",
    "output_router_logits": "training",
    "router_aux_loss_coef": "training",
    "router_jitter_noise": "training",
    "pad_token_id": "batches are ragged, nothing is padded with a token",
    "output_attentions": "an output option of another library",
    "output_hidden_states": "an output option of another library",
    "return_dict": "an output option of another library",
    "chunk_size_feed_forward": "an output option of another library",
    "is_encoder_decoder": "an output option of another library",
    "id2label": "classification heads",
    "label2id": "classification heads",
    "problem_type": "classification heads",
    "max_batch_size": "sizes are the pool's and the backend's",
    "max_seq_len": "sizes are the pool's and the backend's",
    "scale_dtype": "decided by the stored dtype",
    "quantization_config.modules_to_not_convert": "decided by the stored dtype",
}
"""Known keys without effect here, and why."""

YARN_PLACES = {
    "rope_type": ("rope_scaling.type", "rope_scaling.rope_type"),
    "factor": ("rope_scaling.factor", "rope_factor"),
    "beta_fast": ("rope_scaling.beta_fast", "beta_fast"),
    "beta_slow": ("rope_scaling.beta_slow", "beta_slow"),
    "original_max_position_embeddings": (
        "rope_scaling.original_max_position_embeddings",
        "original_seq_len",
    ),
}
"""Where published and official files state YaRN; transformers uses `rope_parameters`."""

DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "fp8": "bfloat16",
}
"""`torch_dtype` or `dtype` -> activation dtype. Official: fp8 weights run in bf16."""

LAYER_TYPES = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
"""transformers' `layer_types` -> LayerKind value."""

MLP_TYPES = {"hash_moe": True, "moe": False}
"""transformers' `mlp_layer_types` -> hash routing."""
