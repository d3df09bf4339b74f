"""Preparation of an engine's server: ``python -m grpo_worker.rollout.sglang.prepare MODEL DIRECTORY``.

The command writes config.json and the key to the server's control routes, which never leaves the pod; with
``--tokenizer`` it also copies the model's tokenizer, and with ``--api-key FILE`` the key of requests, so that
the agent has the one that the server starts with. With ``--turn URL`` it then waits until URL answers 200,
which means that the engines may use the GPUs that they share with trainers.
"""

import argparse
import json
import secrets
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path

from grpo_operator.api.catalog.presets import PRESET
from grpo_operator.api.names import API_KEY
from grpo_worker.common import tls
from grpo_worker.model_files.config import model_config
from grpo_worker.model_files.names import FP8_CONFIG, TINY_TOKENIZER, TOKENIZER_FILES


def main() -> None:
    """Prepare the directory from the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--fp8-block128", action="store_true", help="weights are FP8 with block scales")
    parser.add_argument("--tokenizer", action="store_true", help="copy the tokenizer's files")
    parser.add_argument("--api-key", type=Path, metavar="FILE", help="copy the key of requests")
    parser.add_argument("--turn", metavar="URL", help="wait until this answers 200")
    args = parser.parse_args()
    config = model_config(args.model)
    if args.fp8_block128:
        config["quantization_config"] = FP8_CONFIG
    args.directory.mkdir(parents=True, exist_ok=True)
    (args.directory / "config.json").write_text(json.dumps(config))
    if args.tokenizer:
        copy_tokenizer(args.model, args.directory)
    key = args.directory / "admin-key"
    if not key.exists():  # a restarted engine keeps the key that its agent knows
        key.touch(mode=0o600)
        key.write_text(secrets.token_hex(32))
    if args.api_key:
        copy_key(args.api_key, args.directory / API_KEY)
    if args.turn:
        await_turn(args.turn)


def copy_key(source: Path, copy: Path) -> None:
    """Copy the key of requests. Raises ValueError for a file without one."""
    key = source.read_text().strip()
    if not key or any(letter.isspace() for letter in key):
        raise ValueError(f"{API_KEY} in the Secret of serve.secretName must be one word: correct the Secret")
    copy.touch(mode=0o600)
    copy.write_text(key)


def copy_tokenizer(model: str, directory: Path) -> None:
    """Copy the files of a model's tokenizer.

    The copied configuration names the generic fast class, so that SGLang reads ``tokenizer.json`` unchanged,
    as the controller does, regardless of the class that the model's own configuration names.
    """
    if model.startswith(PRESET):
        shutil.copyfile(TINY_TOKENIZER, directory / "tokenizer.json")
    else:
        for name in TOKENIZER_FILES:
            if (Path(model) / name).is_file():
                shutil.copyfile(Path(model) / name, directory / name)
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))


def await_turn(url: str, pause: float = 0.5) -> None:
    """Poll ``url`` every ``pause`` seconds until it answers 200."""
    verify = tls.for_urllib()
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5, context=verify):  # noqa: S310 - URL of the pod's agent
                return
        except (urllib.error.URLError, OSError):  # not the engines' turn, or the agent is not up yet
            time.sleep(pause)


if __name__ == "__main__":
    main()
