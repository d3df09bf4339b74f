"""Data files and rewards of a configuration, and the volume that holds them."""

import re
from collections.abc import Sequence
from typing import Any

from grpo_operator.convert.draft import Draft

_DATA = "/data"
_FUNCTION = re.compile(r"/.*\.py:\w+")
_BUILTIN = ("math", "code", "json", "choice")
_FAMILIES = ("qwen", "llama", "deepseek", "mistral", "gemma", "glm", "internlm", "skywork")  # of tokenizers
_MATHEMATICS = re.compile(
    r"gsm8k|math|aime|dapo|deepscaler|amc|numina|olympiad|orz|big_?reasoning|skywork.?or1", re.IGNORECASE
)


def paths(value: Any) -> list[str]:
    """Return the paths of a list or of one path. Raises ValueError if there is none."""
    found = [str(each) for each in (value if isinstance(value, list) else [value]) if each]
    if not found:
        raise ValueError("name at least one file")
    return found


def place_data(draft: Draft) -> None:
    """Set the fields of the data from the fact ``files``."""
    files: list[str] = draft.fact("files", [])
    if not files:
        draft.errors.append("the configuration names no training data: add it, or --define it")
        return
    shorts = [_short(path) for path in files]
    pattern = _pattern(shorts)
    if not re.search(r"\.(parquet|jsonl|json)$", pattern):
        unknown = draft.options["files"].unknown if "files" in draft.options else None
        draft.refuse("files", unknown or "name Parquet, .jsonl or .json files")
        return
    draft.take("data.train", f"{_DATA}/{pattern}")
    listed = ", ".join(f"{path} as {short}" for path, short in zip(files, shorts, strict=True))
    draft.choose("data.volume", {"mountPath": _DATA, "pvc": "datasets"}, f"copy into this claim: {listed}")
    if "*" in pattern and "*" not in "".join(shorts):
        draft.chosen.append(
            f"data.train: {_DATA}/{pattern}: one pattern for all files: it must match no others"
        )


def place_reward(draft: Draft, given: str) -> None:
    """Set the reward: as ``--reward`` says, else from the facts, else by the names of the data."""
    files = draft.fact("files", [])
    if _FUNCTION.fullmatch(given):
        draft.take("reward.function", given)
        draft.taken.append(f"--reward={given} -> reward.function")
    elif given.startswith(("http://", "https://")):
        draft.take("reward.url", given)
        draft.taken.append(f"--reward={given} -> reward.url")
    elif given:
        if given not in _BUILTIN:
            draft.errors.append(f"--reward={given}: write {', '.join(_BUILTIN)}, /FILE.py:FUNCTION or URL")
        draft.take("reward.builtin", given)
        draft.taken.append(f"--reward={given} -> reward.builtin")
    elif path := draft.fact("reward_path"):
        _function(draft, str(path), str(draft.fact("reward_name", "compute_score")))
    elif draft.fact("custom_reward"):
        form = "write it as compute_score(data_source, solution_str, ground_truth, extra_info)"
        draft.refuse(
            "custom_reward", f"it has slime's signature: {form}, and add --reward /data/FILE.py:NAME"
        )
    elif draft.fields.get("reward.url"):
        pass
    elif draft.fact("reward_model_enabled", False):
        _model(draft)
    elif kind := draft.fact("reward_builtin"):
        draft.take("reward.builtin", kind)
    elif any(_MATHEMATICS.search(path) for path in files):
        reason = "the data is mathematics; --reward FILE.py:FUNCTION keeps your own verifier"
        draft.choose("reward.builtin", "math", reason)
    else:
        draft.errors.append(
            f"the reward of {', '.join(files) or 'the data'} is not in the configuration: "
            f"add --reward {'|'.join(_BUILTIN)} or --reward {_DATA}/FILE.py:FUNCTION"
        )
    _overlong(draft)


def _function(draft: Draft, path: str, name: str) -> None:
    file = path.rsplit("/", 1)[-1]
    draft.take("reward.function", f"{_DATA}/{file}:{name}")
    draft.chosen.append(f"reward.function: {_DATA}/{file}:{name}: copy {path} into the claim of data.volume")


def _model(draft: Draft) -> None:
    path = str(draft.fact("reward_model", ""))
    name = path.rstrip("/").rsplit("/", 1)[-1]
    policy = str(draft.fact("model", "")).rstrip("/").rsplit("/", 1)[-1]
    families = {_family(name), _family(policy)} - {None}
    if len(families) > 1:
        draft.refuse(
            "reward_model", "a reward model must have the policy's tokenizer: serve it, and add --reward URL"
        )
    draft.take("reward.model", {"path": f"/models/{name}"})
    draft.take("model.path", f"/models/{policy}")
    reason = f"one claim has both, with one tokenizer: copy the policy to {policy} and {path} to {name}"
    draft.choose("model.volume", {"mountPath": "/models", "pvc": "models"}, reason)


def _family(model: str) -> str | None:
    return next((name for name in _FAMILIES if name in model.lower()), None)


def _overlong(draft: Draft) -> None:
    if draft.fact("overlong_enable", False):
        draft.take("algorithm.overlong.bufferLength", draft.fact("overlong_length", 0))
        draft.take("algorithm.overlong.penalty", draft.fact("overlong_penalty", 1.0))
        if "reward.builtin" in draft.fields:
            reason = "rewards are 0 or 1: halve it if yours were -1 or 1, as those of math_dapo"
            draft.chosen.append(
                f"algorithm.overlong.penalty: {draft.fact('overlong_penalty', 1.0)}: {reason}"
            )


def _short(path: str) -> str:
    """Return the last directory and the name of a file, without what only the old machine knows."""
    parts = [part for part in path.split("/") if part and not re.search(r"[$~({]", part)]
    return "/".join(parts[-2:]) if len(parts) > 1 else (parts or [path])[0]


def _pattern(files: Sequence[str]) -> str:
    """Return one glob pattern for several files."""
    split = [file.split("/") for file in files]
    if len({len(parts) for parts in split}) > 1:
        split = [parts[-1:] for parts in split]
    columns = zip(*split, strict=True)
    return "/".join(column[0] if len(set(column)) == 1 else _common(column) for column in columns)


def _common(names: Sequence[str]) -> str:
    """Return a pattern for file names that differ; it keeps their extension."""
    extensions = {name.rsplit(".", 1)[-1] for name in names if "." in name}
    return f"*.{extensions.pop()}" if len(extensions) == 1 and all("." in name for name in names) else "*"
