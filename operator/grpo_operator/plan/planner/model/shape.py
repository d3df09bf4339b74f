"""Dimensions from a Hugging Face ``config.json`` that determine layouts and memory (pure)."""

from dataclasses import dataclass
from typing import Any

KNOWN = ("deepseek_v3", "glm4_moe", "kimi_k2", "llama", "qwen2", "qwen3", "qwen3_moe")
_MLA = ("deepseek_v3", "kimi_k2")


@dataclass(frozen=True, slots=True)
class MlaShape:
    """Multi-head latent attention. ``q_rank``: None when queries are not compressed."""

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class GqaShape:
    """Grouped-query attention.

    ``norms``: each query and key head is normalised. ``biases``: queries, keys and values have one.
    """

    kv_heads: int
    head: int
    norms: bool = True
    biases: bool = False


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Mixture of experts.

    ``ffn``: width of one expert. ``shared_ffn``: width of all shared experts. ``biases``: routers choose
    experts with a bias for each, which is not a parameter.
    """

    count: int
    top_k: int
    ffn: int
    shared_ffn: int
    first_dense: int
    biases: bool = False


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder.

    ``ffn``: width of the feed-forward of a dense layer. ``mtp_layers``: multi-token-prediction layers that
    the model was published with.
    """

    model_type: str
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    ffn: int
    tied: bool
    attention: MlaShape | GqaShape
    experts: ExpertShape | None
    mtp_layers: int = 0

    @property
    def dense_layers(self) -> int:
        """Return the number of leading layers without experts."""
        return self.layers if self.experts is None else self.experts.first_dense

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "ModelShape":
        """Read a config.json.

        Raises ValueError for an unknown ``model_type`` and for a missing key.
        """
        kind = config.get("model_type")
        if kind not in KNOWN:
            raise ValueError(f"model_type {kind!r} is not supported; known: {', '.join(KNOWN)}")
        try:
            return cls(
                model_type=kind,
                layers=config["num_hidden_layers"],
                hidden=config["hidden_size"],
                vocabulary=config["vocab_size"],
                heads=config["num_attention_heads"],
                ffn=config["intermediate_size"],
                tied=bool(config.get("tie_word_embeddings", False)),
                attention=_mla(config) if kind in _MLA else _gqa(kind, config),
                experts=_experts(kind, config),
                mtp_layers=config.get("num_nextn_predict_layers") or 0,
            )
        except KeyError as error:
            raise ValueError(f"config.json of a {kind} model lacks {error.args[0]!r}") from error


def _mla(config: dict[str, Any]) -> MlaShape:
    return MlaShape(
        q_rank=config["q_lora_rank"],
        kv_rank=config["kv_lora_rank"],
        nope=config["qk_nope_head_dim"],
        rope=config["qk_rope_head_dim"],
        value=config["v_head_dim"],
    )


def _gqa(kind: str, config: dict[str, Any]) -> GqaShape:
    norms, biases = kind in ("qwen3", "qwen3_moe"), kind == "qwen2"
    if kind == "glm4_moe":
        norms, biases = bool(config.get("use_qk_norm")), bool(config.get("attention_bias"))
    return GqaShape(
        kv_heads=config["num_key_value_heads"],
        head=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        norms=norms,
        biases=biases,
    )


def _experts(kind: str, config: dict[str, Any]) -> ExpertShape | None:
    if kind in ("llama", "qwen2", "qwen3"):
        return None
    ffn = config["moe_intermediate_size"]
    if kind == "qwen3_moe":
        if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
            raise ValueError("qwen3_moe with dense layers between the experts is not supported")
        return ExpertShape(config["num_experts"], config["num_experts_per_tok"], ffn, 0, 0)
    return ExpertShape(
        count=config["n_routed_experts"],
        top_k=config["num_experts_per_tok"],
        ffn=ffn,
        shared_ffn=ffn * config["n_shared_experts"],
        first_dense=config["first_k_dense_replace"],
        biases=True,
    )
