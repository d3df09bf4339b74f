"""Models that configurations name: their architecture here, and the volume that holds their files."""

import re

from grpo_operator.api.catalog.architectures import ARCHITECTURES
from grpo_operator.api.v1alpha1.moe import WITH_EXPERT_BIAS
from grpo_operator.convert.draft import Draft

# Names of published models, without their organisation, and their architecture in the catalog.
_ARCHITECTURES = (
    (r"Qwen3-8B(-Base)?", "qwen3-8b"),
    (r"Qwen3-30B-A3B(-Base)?", "qwen3-30b-a3b"),
    (r"Qwen3-235B-A22B", "qwen3-235b-a22b"),
    (r"(Meta-)?Llama-3\.1-8B(-Instruct)?", "llama-3.1-8b"),
    (r"Qwen2\.5-7B(-Instruct)?", "qwen2.5-7b"),
    (r"DeepSeek-(V3(-Base|-0324|\.1|\.1-Base)?|R1(-Zero|-0528)?)(-bf16)?", "deepseek-v3"),
    (r"GLM-4\.5-Air(-Base)?", "glm-4.5-air"),
    (r"GLM-4\.7", "glm-4.7"),
    (r"Kimi-K2-(Base|Instruct)(-bf16)?", "kimi-k2"),
)
# Parts of the names of models that no family here can train.
_NO_FAMILY = "no model family here trains it"
_UNSUPPORTED = (
    (
        r"VL\b|vision|omni|4\.1V|minicpm|llava|avlm",
        "it reads images or sound, and jobs train text models only",
    ),
    (r"gemma|mistral|gpt-?oss|seed-?oss|minimax|nemotron(?!.*llama)|nano-v2|mimo|phi-?\d", _NO_FAMILY),
    (r"int4|w4a16|awq|gptq|kimi-k2-thinking", "the trainer reads bf16 and FP8 weights: name such a model"),
    (r"qwen1\.5-moe|qwen3-next|qwen3\.[56]|qwen2-57b", _NO_FAMILY),
    (r"glm-?4-9b|glm-?4-32b|glm-?4-0414|glm-?4\.7-(flash|30b)|glm-?5|glm-z1", _NO_FAMILY),
)
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def architecture(model: str) -> str | None:
    """Return the name in the catalog of a published model's architecture, or None."""
    name = _last(model)
    return next((known for form, known in _ARCHITECTURES if re.fullmatch(form, name, re.IGNORECASE)), None)


def unsupported(model: str) -> str | None:
    """Return why no job can train a model, or None. Models with unknown names may be supported."""
    name = _last(model)
    return next((why for form, why in _UNSUPPORTED if re.search(form, name, re.IGNORECASE)), None)


def has_expert_bias(model: str) -> bool:
    """Return whether a model's routers choose experts with a bias, which trainer.moe.biasUpdateRate moves."""
    known = architecture(model)
    if known is not None:
        return ARCHITECTURES[known]["model_type"] in WITH_EXPERT_BIAS
    return (
        re.search(r"moonlight|deepseek-v3|deepseek-r1|kimi-k2|glm-4\.[567]", _last(model), re.I) is not None
    )


def place_model(draft: Draft) -> None:
    """Set the fields of the model from the fact ``model``, a hub's id or a directory."""
    model = str(draft.fact("model", "")).rstrip("/")
    if not model:
        draft.errors.append("the configuration names no model: add one, or --define it")
        return
    if why := unsupported(model):
        instead = "see docs/development/adding-a-model-family.md for the supported ones"
        draft.refuse("model", f"{why}: {instead}")
    name = _last(model)
    if _HUB.fullmatch(model):
        draft.take("model.path", f"/models/{name}")
        where = {"mountPath": f"/models/{name}", "uri": f"hf://{model}"}
        draft.choose("model.volume", where, "the model is downloaded once into the checkpoint store")
    else:
        draft.take("model.path", f"/models/{name}")
        reason = f"copy {model} into the root of this claim, or name a volume that has it"
        draft.choose("model.volume", {"mountPath": "/models", "pvc": "models"}, reason)
    if known := architecture(model):
        draft.choose("model.architecture", known, f"the published {name} has it, and the planner needs it")


def _last(model: str) -> str:
    return model.rstrip("/").rsplit("/", 1)[-1]
