"""``python -m grpo_worker.rollout.model_directory MODEL DIRECTORY [--fp8-block128] [--turn URL]``:
config.json for an engine, and the key to its control routes, which never leaves the pod. With ``--turn`` it
ends when URL says that the GPUs are the engines'."""

import json
import secrets
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from grpo_worker.megatron.presets import model_config

# As in the config.json of DeepSeek-V3: the engine makes room for FP8 weights with block scales. Written out,
# because data/fp8.py imports torch, for which every start of an engine would wait.
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def main() -> None:
    """Write the configuration of the model given first into the directory given second."""
    directory, config = Path(sys.argv[2]), model_config(sys.argv[1])
    if "--fp8-block128" in sys.argv:
        config["quantization_config"] = FP8_CONFIG
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    key = directory / "admin-key"
    if not key.exists():  # a restarted engine keeps the key that its agent knows
        key.touch(mode=0o600)
        key.write_text(secrets.token_hex(32))
    if "--turn" in sys.argv:
        await_turn(sys.argv[sys.argv.index("--turn") + 1])


def await_turn(url: str, pause: float = 0.5) -> None:
    """Ask every ``pause`` seconds until the answer is 200."""
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):  # not yet, or the agent is not there yet
            time.sleep(pause)


if __name__ == "__main__":
    main()
