"""Rewards of a configuration: a function, a verifier, a reward model, and the penalty for long answers."""

import re

from grpo_operator.convert.draft import Draft
from grpo_operator.convert.fields.data import DATA

_FUNCTION = re.compile(r"/.*\.py:\w+")
_BUILTIN = ("math", "code", "json", "choice")
_FAMILIES = ("qwen", "llama", "deepseek", "mistral", "gemma", "glm", "internlm", "skywork")  # of tokenizers
# Verifiers of slime and environments of NeMo-RL.
_VERIFIERS = {"math": "math", "deepscaler": "math", "dapo": "math", "gpqa": "choice"}
_MATHEMATICS = re.compile(
    r"gsm8k|math|aime|dapo|deepscaler|amc|numina|olympiad|orz|big_?reasoning|skywork.?or1", re.IGNORECASE
)
_REMEDY = f"add --reward {'|'.join(_BUILTIN)} or --reward {DATA}/FILE.py:FUNCTION"


def place_reward(draft: Draft, given: str) -> None:
    """Set the reward: as ``--reward`` says, else from the facts, else by the names of the data."""
    if given:
        _as_given(draft, given)
    elif path := draft.fact("reward_path"):
        _function(draft, str(path), str(draft.fact("reward_name", "compute_score")))
    elif draft.fact("custom_reward"):
        form = "write it as compute_score(data_source, solution_str, ground_truth, extra_info)"
        draft.refuse("custom_reward", f"it has slime's signature: {form}, and {_REMEDY}")
    elif draft.fact("reward_model_enabled", False):
        _model(draft)
    elif (verifier := draft.fact("environment")) is not None:
        if verifier in _VERIFIERS:
            draft.take("reward.builtin", _VERIFIERS[verifier])
        else:
            draft.refuse("environment", f"jobs have no such verifier: {_REMEDY}")
    else:
        _by_data(draft)
    _overlong(draft)


def _as_given(draft: Draft, given: str) -> None:
    if _FUNCTION.fullmatch(given):
        field = "reward.function"
    elif given.startswith(("http://", "https://")):
        field = "reward.url"
    else:
        field = "reward.builtin"
        if given not in _BUILTIN:
            draft.errors.append(f"--reward={given}: write {', '.join(_BUILTIN)}, /FILE.py:FUNCTION or URL")
    draft.take(field, given)
    draft.taken.append(f"--reward={given} -> {field}")


def _by_data(draft: Draft) -> None:
    files: list[str] = draft.fact("files", [])
    if files and all(_MATHEMATICS.search(path) for path in files):
        reason = "the data is mathematics; --reward FILE.py:FUNCTION keeps your own verifier"
        draft.choose("reward.builtin", "math", reason)
    else:
        data = ", ".join(files) or "the data"
        draft.errors.append(f"the reward of {data} is not in the configuration: {_REMEDY}")


def _function(draft: Draft, path: str, name: str) -> None:
    file = path.rsplit("/", 1)[-1]
    draft.take("reward.function", f"{DATA}/{file}:{name}")
    draft.chosen.append(f"reward.function: {DATA}/{file}:{name}: copy {path} into the claim of data.volume")


def _model(draft: Draft) -> None:
    """Set a reward model, whose files are beside the policy's."""
    path = str(draft.fact("reward_model", ""))
    name, policy = _last(path), _last(str(draft.fact("model", "")))
    if len({_family(name), _family(policy)} - {None}) > 1:
        draft.refuse(
            "reward_model", "a reward model must have the policy's tokenizer: serve it, and add --reward URL"
        )
    draft.chosen = [line for line in draft.chosen if not line.startswith("model.volume: ")]
    draft.take("reward.model", {"path": f"/models/{name}"})
    draft.take("model.path", f"/models/{policy}")
    reason = f"one claim has both, with one tokenizer: copy the policy to {policy} and {path} to {name}"
    draft.choose("model.volume", {"mountPath": "/models", "pvc": "models"}, reason)


def _family(model: str) -> str | None:
    return next((name for name in _FAMILIES if name in model.lower()), None)


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def _overlong(draft: Draft) -> None:
    if not draft.fact("overlong_enable", False):
        return
    penalty = draft.fact("overlong_penalty", 1.0)
    draft.take("algorithm.overlong.bufferLength", draft.fact("overlong_length", 0))
    draft.take("algorithm.overlong.penalty", penalty)
    if "reward.builtin" in draft.fields:
        reason = "rewards are 0 or 1: halve it if yours were -1 or 1, as those of math_dapo"
        draft.chosen.append(f"algorithm.overlong.penalty: {penalty}: {reason}")
