"""``python -m grpo_worker.rollout.model_directory MODEL DIRECTORY``: config.json for an engine."""

import json
import sys
from pathlib import Path

from grpo_worker.megatron.presets import model_config


def main() -> None:
    """Write the configuration of the model given first into the directory given second."""
    model, directory = sys.argv[1], Path(sys.argv[2])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model_config(model)))


if __name__ == "__main__":
    main()
