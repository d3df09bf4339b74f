"""Description of a model family: its configuration, its tensors and their names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Shapes = dict[str, tuple[int, ...]]
# Fields of every family; ``fields`` and ``layer_shapes`` read the others.
_COMMON_FIELDS = (
    "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
    "rms_norm_eps", "rope_theta", "vocab_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """A Hugging Face architecture as Megatron-Core runs it.

    ``fields``: config.json -> fields of Megatron-Core's configuration.
    ``layer_shapes``: (config.json, layer) -> names below ``model.layers.N.`` and their shapes.
    ``layer_names``: local Megatron tensor of a layer -> the Hugging Face tensors that it holds, in order.
    ``rotary``: config.json -> arguments of GPTModel for rotary embeddings, beside their base.
    ``mtp_layer_shapes``: names below ``model.layers.N.`` of the multi-token-prediction layer, where N is the
    number of layers, and their shapes. Experts and ``linear_qkv`` are mapped in conversion/.
    """

    model_type: str
    fields: Callable[[dict[str, Any]], dict[str, Any]]
    layer_shapes: Callable[[dict[str, Any], int], Shapes]
    layer_names: Mapping[str, tuple[str, ...]]
    rotary: Callable[[dict[str, Any]], dict[str, Any]] = lambda _hf: {}
    mtp_layer_shapes: Callable[[dict[str, Any]], Shapes] | None = None

    def check(self, hf: dict[str, Any]) -> None:
        """Check a config.json. Raises ValueError that names a missing or unsupported field."""
        try:
            for field in _COMMON_FIELDS:
                hf[field]
            self.fields(hf)
            self.rotary(hf)
            self.shapes(hf)
        except KeyError as error:
            raise ValueError(f"config.json lacks {error.args[0]}") from error

    def shapes(self, hf: dict[str, Any]) -> Shapes:
        """Return the name and shape of each tensor in a checkpoint of this family."""
        hidden, vocab = hf["hidden_size"], hf["vocab_size"]
        shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
        if not hf.get("tie_word_embeddings"):
            shapes["lm_head.weight"] = (vocab, hidden)
        for layer in range(hf["num_hidden_layers"]):
            parts = self.layer_shapes(hf, layer)
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
        return shapes

    def mtp_shapes(self, hf: dict[str, Any]) -> Shapes:
        """Return the name and shape of each tensor of the multi-token-prediction layer.

        Raises ValueError for models without such a layer, or with several.
        """
        layers = hf.get("num_nextn_predict_layers") or 0
        if self.mtp_layer_shapes is None or layers != 1 or hf.get("tie_word_embeddings"):
            raise ValueError(
                f"spec.model.multiTokenPrediction: needs a deepseek_v3 model with num_nextn_predict_layers=1 "
                f"and an output projection of its own, got {self.model_type} with {layers}: set it to false"
            )
        prefix = f"model.layers.{hf['num_hidden_layers']}."
        return {prefix + name: shape for name, shape in self.mtp_layer_shapes(hf).items()}


def gated(prefix: str, hidden: int, width: int) -> Shapes:
    """Return the shapes of the three matrices of a gated MLP."""
    return {
        prefix + "gate_proj.weight": (width, hidden),
        prefix + "up_proj.weight": (width, hidden),
        prefix + "down_proj.weight": (hidden, width),
    }


def first_rows(widths: Sequence[int], groups: int = 1) -> Iterator[list[int]]:
    """Return where each part of a fused tensor begins, in each of the groups in which the parts alternate.

    ``widths``: rows of each part in one group.
    """
    start = 0
    for width in widths:
        yield [group * sum(widths) + start for group in range(groups)]
        start += width


# Tensors outside of the layers: Megatron-Core's name -> Hugging Face's.
GLOBAL_NAMES: dict[str, str] = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
QKV = "self_attention.linear_qkv."  # the fused tensors of grouped attention
# Tensors of one expert: Megatron-Core's name -> Hugging Face's.
EXPERT_PARTS: dict[str, tuple[str, ...]] = {
    "linear_fc1": ("gate_proj.weight", "up_proj.weight"),
    "linear_fc2": ("down_proj.weight",),
}
MTP_LAYER = "next_tokens"  # the layer of multi-token prediction in a model, and so in the keys of checkpoints
# Tensors of multi-token prediction beside its transformer layer: Megatron-Core's name -> Hugging Face's.
MTP_NAMES: dict[str, str] = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}

# Names that the families share: Megatron-Core's -> Hugging Face's.
COMMON_NAMES: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.router.weight": ("mlp.gate.weight",),
}
