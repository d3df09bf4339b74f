"""Make a small tokenizer of a published one: fewer merges, fewer reserved tokens, nothing else changed.

    python tests/support/published_models/shrink_tokenizer.py TOKENIZER_JSON TOKENIZER_CONFIG_JSON OUT_FOLDER

The vocabulary keeps the tokens before its bytes, the bytes, and what the first merges make of them, in the
published order; the added tokens follow. Text that needs no other merge is split as the published tokenizer
splits it.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

MERGES = 1000
# DeepSeek reserves 800 tokens, which it calls place holders, for later use.
RESERVED = 8
_PLACEHOLDER = re.compile(r"<\uff5cplace▁holder▁no▁(\d+)\uff5c>")


def shrink(tokenizer: dict[str, Any], merges: int, reserved: int) -> tuple[dict[str, Any], dict[int, int]]:
    """A smaller ``tokenizer.json``, and the new id of each published id that it keeps."""
    model = tokenizer["model"]
    kept = model["merges"][:merges]
    added = [token for token in tokenizer["added_tokens"] if _stays(token["content"], reserved)]
    wanted = _bytes_of(model) | {"".join(_pair(merge)) for merge in kept}
    wanted |= {token["content"] for token in added if token["content"] in model["vocab"]}
    published = {text: number for text, number in model["vocab"].items() if text in wanted}
    published |= {token["content"]: token["id"] for token in added}
    in_order = sorted(published, key=published.__getitem__)
    number = {text: new for new, text in enumerate(in_order)}
    small = tokenizer | {
        "added_tokens": [token | {"id": number[token["content"]]} for token in added],
        "model": model
        | {"vocab": {text: number[text] for text in in_order if text in wanted}, "merges": kept},
    }
    return small, {published[text]: new for text, new in number.items()}


def renumber(config: dict[str, Any], ids: dict[int, int]) -> dict[str, Any]:
    """A ``tokenizer_config.json`` with the ids of the smaller tokenizer."""
    if "added_tokens_decoder" not in config:
        return config
    decoder = config["added_tokens_decoder"]
    return config | {"added_tokens_decoder": {str(ids[int(old)]): token for old, token in decoder.items()}}


def _stays(content: str, reserved: int) -> bool:
    placeholder = _PLACEHOLDER.fullmatch(content)
    return placeholder is None or int(placeholder.group(1)) < reserved


def _bytes_of(model: dict[str, Any]) -> set[str]:
    """The tokens of one character, which byte-level BPE starts from."""
    return {text for text in model["vocab"] if len(text) == 1 and ord(text) < 0x144}


def _pair(merge: str | list[str]) -> list[str]:
    """Older files write a merge as one string."""
    return merge.split(" ") if isinstance(merge, str) else merge


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write JSON as it is committed: readable, characters unescaped."""
    file.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Write OUT_FOLDER/tokenizer.json and OUT_FOLDER/tokenizer_config.json."""
    parser = argparse.ArgumentParser(description="Make a small tokenizer of a published one.")
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    small, ids = shrink(json.loads(arguments.tokenizer.read_text("utf-8")), MERGES, RESERVED)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / "tokenizer.json", small)
    config = json.loads(arguments.config.read_text("utf-8"))
    write_json(arguments.out / "tokenizer_config.json", renumber(config, ids))


if __name__ == "__main__":
    main()
