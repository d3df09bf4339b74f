"""Readers of configurations: a framework's options from the text of a script or a YAML file."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from grpo_operator.convert.errors import ConvertError
from grpo_operator.convert.reading.script import Argument, argument_lists
from grpo_operator.convert.reading.source import Framework, Option, Source, last_of_each, parsed
from grpo_operator.convert.reading.yaml_config import documents, flat_options

_VERL_PROGRAM = re.compile(
    r"verl\.trainer\.main_ppo|recipe\.dapo\.main_dapo|dapo\.main_dapo|(\S*/)?main_ppo\.py"
)
_OTHER_PROGRAM = re.compile(
    r"(verl|recipe)\.[\w.]*(main|trainer)[\w.]*|(\S*/)?main_\w+\.py|[\w.]+\.\w*main\w*"
)
_SLIME_PROGRAM = re.compile(r"(\S*/)?train(_async)?\.py")
_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*)=(.*)", re.DOTALL)
_KNOWN_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer")


def is_yaml(text: str) -> bool:
    """Return whether a text is a YAML mapping and no script."""
    if text.startswith("#!"):
        return False
    try:
        return isinstance(yaml.safe_load(text), dict)
    except yaml.YAMLError:
        return False


def detect(text: str) -> Framework:
    """Return the framework of a configuration. Raises ConvertError."""
    if is_yaml(text):
        content = documents([text])
        keys = content.keys()
        if "actor_rollout_ref" in keys or {"algorithm", "trainer"} <= keys:
            return Framework.VERL
        if keys & {"policy", "grpo", "loss_fn", "cluster"} or isinstance(content.get("defaults"), str):
            return Framework.NEMO_RL
    elif re.search(r"verl\.trainer|actor_rollout_ref\.|main_ppo", text):
        return Framework.VERL
    elif re.search(r"--(advantage-estimator|hf-checkpoint|rollout-batch-size)\b", text):
        return Framework.SLIME
    raise ConvertError(
        "the configuration is of no known framework: add --from verl, --from slime or --from nemo-rl"
    )


def read(framework: Framework, texts: Sequence[str], given: Mapping[str, str]) -> Source:
    """Return the options of a configuration. ``texts``: what it inherits from, in order, and itself.

    ``given``: values of variables that it does not set. Raises ConvertError.
    """
    text = texts[-1]
    if framework is Framework.NEMO_RL or is_yaml(text):
        if framework is Framework.SLIME:
            raise ConvertError("slime is configured by scripts: write --from verl or --from nemo-rl for YAML")
        content = documents(texts)
        notes = _unread(content) if framework is Framework.VERL else ()
        return Source(framework, tuple(flat_options(content, given)), notes)
    if framework is Framework.VERL:
        return _verl_script(text, given)
    return _slime_script(text, given)


def _unread(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes on configurations that hydra would read before this one."""
    given = content.get("defaults") or []
    names = [name for name in given if name not in ("_self_", *_KNOWN_CONFIGS)]
    remedy = "it is not read: convert what the training command prints with --cfg job"
    return tuple(f"defaults: {name}: {remedy}" for name in names)


def _verl_script(text: str, given: Mapping[str, str]) -> Source:
    lists = argument_lists(text, given)
    words = _program(lists, _VERL_PROGRAM, "verl.trainer.main_ppo", _OTHER_PROGRAM)
    overrides = [(word, _OVERRIDE.fullmatch(word.text)) for word in words]
    options = [_override(word, match) for word, match in overrides if match]
    _check_config(words)
    return Source(Framework.VERL, last_of_each(options), _after_comments(lists))


def _override(word: Argument, match: "re.Match[str]") -> Option:
    return Option(match[2], parsed(match[3]), match[3], word.unknown)


def _check_config(words: Sequence[Argument]) -> None:
    """Raise ConvertError if the command reads a configuration that is not verl's own."""
    for word in words:
        match = re.fullmatch(r"--config-name[= ]?'?([^']*?)'?(\.yaml)?", word.text)
        if match and match[1] not in _KNOWN_CONFIGS:
            why = f": {word.unknown}" if word.unknown else ""
            raise ConvertError(
                f"--config-name={match[1]} holds further options{why}: print the whole configuration with "
                "the script's command and --cfg job, and convert that YAML"
            )


def _after_comments(lists: Sequence[Sequence[Argument]]) -> tuple[str, ...]:
    """Return notes on options that a comment has cut from the command, as bash cuts them."""
    return tuple(
        f"line {words[0].line}: {words[0].text}: bash reads no options after a comment within a command"
        for words in lists
        if words
        and re.match(r"\+?(actor_rollout_ref|data|algorithm|trainer|critic|reward_model)\.", words[0].text)
    )


def _slime_script(text: str, given: Mapping[str, str]) -> Source:
    words = _program(
        argument_lists(text, given), _SLIME_PROGRAM, "train.py", re.compile(r"(\S*/)?train\w*\.py")
    )
    options: list[Option] = []
    notes: list[str] = []
    at = 1
    while at < len(words):
        word, at = words[at], at + 1
        if not word.text.startswith("--"):
            elsewhere = "set in another file: the model's sizes are read from its config.json"
            sizes = word.text == "${MODEL_ARGS[@]}"
            notes.append(f"{word.text}: {elsewhere if sizes else word.unknown or 'no option'}")
            continue
        name, equals, value = word.text.partition("=")
        values = [Argument(word.line, value, word.unknown)] if equals else []
        while not equals and at < len(words) and not re.match(r"--|\$\{\w+\[", words[at].text):
            values.append(words[at])
            at += 1
        options.append(_flag(name, values))
    program = words[0].text.rsplit("/", 1)[-1]
    return Source(
        Framework.SLIME, (Option("program", program, program), *last_of_each(options)), tuple(notes)
    )


def _flag(name: str, values: Sequence[Argument]) -> Option:
    written = " ".join(value.text for value in values)
    unknown = next((value.unknown for value in values if value.unknown), None)
    if not values:
        return Option(name, True, "true")
    content = [parsed(value.text) for value in values]
    return Option(name, content[0] if len(content) == 1 else content, written, unknown)


def _program(
    lists: Sequence[Sequence[Argument]], wanted: "re.Pattern[str]", name: str, other: "re.Pattern[str]"
) -> Sequence[Argument]:
    """Return the program and its arguments, of the only command that runs it. Raises ConvertError."""
    found = [words[at:] for words in lists for at, word in enumerate(words) if wanted.fullmatch(word.text)]
    if len(found) > 1:
        raise ConvertError(f"the script runs {name} {len(found)} times: keep one of the commands")
    if not found:
        others = sorted({word.text for words in lists for word in words if other.fullmatch(word.text)})
        has = (
            f"it runs {', '.join(others)}, whose algorithm no job has"
            if others
            else "no command of it can be read"
        )
        raise ConvertError(f"the script does not run {name}: {has}")
    return found[0]
