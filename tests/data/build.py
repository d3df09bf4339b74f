"""Write small files in the layout of verl's preprocessed GSM8K and MATH, as Parquet and as JSON lines.

The rows are our own; columns, nesting, order and ``data_source`` are those of verl's files. Run
``python tests/data/build.py``; the files are committed beside it.
"""

import sys
from pathlib import Path
from typing import Any

from datasets import Dataset

GSM8K = [
    ("Mara packs 6 boxes with 4 jars each and sells 5 jars. How many jars are left?",
     "She packs 6 * 4 = <<6*4=24>>24 jars.\nShe has 24 - 5 = <<24-5=19>>19 jars left.\n#### 19", "19"),
    ("A bus makes 3 trips of 420 km each. How many km does it drive?",
     "It drives 3 * 420 = <<3*420=1260>>1,260 km.\n#### 1,260", "1260"),
    ("Ilir is 4 degrees above a freezer that is at -9 degrees. How cold is it where he is?",
     "It is -9 + 4 = <<-9+4=-5>>-5 degrees.\n#### -5", "-5"),
    ("Tea costs $2.50 a cup. What do 3 cups cost, in dollars?",
     "They cost 3 * 2.5 = $<<3*2.5=7.5>>7.50.\n#### 7.50", "7.50"),
]  # fmt: skip
MATH = [
    ("Find the sum of the roots of $x^2 - 7x + 10 = 0$.", "7", "Level 1", "Algebra"),
    (r"Write $\frac{6}{8}$ as a fraction in lowest terms.", r"\frac{3}{4}", "Level 1", "Prealgebra"),
    (r"Compute $\binom{5}{2}$.", "10", "Level 2", "Counting & Probability"),
    (r"For which $x > 0$ is $x^2 = 3$?", r"\sqrt{3}", "Level 2", "Algebra"),
]


def gsm8k() -> list[dict[str, Any]]:
    """Rows as verl's GSM8K script lays them out."""
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"content": f"{question} {instruction}", "role": "user"}],
            "ability": "math",
            "reward_model": {"ground_truth": truth, "style": "rule"},
            "extra_info": {"answer": answer, "index": index, "question": question, "split": "train"},
        }
        for index, (question, answer, truth) in enumerate(GSM8K)
    ]


def math() -> list[dict[str, Any]]:
    """Rows as verl's MATH script lays them out; level and type remain from the original."""
    instruction = r"Let's think step by step and output the final answer within \boxed{}."
    return [
        {
            "level": level,
            "type": kind,
            "data_source": "DigitalLearningGmbH/MATH-lighteval",
            "prompt": [{"content": f"{problem} {instruction}", "role": "user"}],
            "ability": "math",
            "reward_model": {"ground_truth": truth, "style": "rule"},
            "extra_info": {"index": index, "split": "train"},
        }
        for index, (problem, truth, level, kind) in enumerate(MATH)
    ]


def build(folder: Path) -> None:
    """Write all files into ``folder``."""
    for name, rows in (("gsm8k", gsm8k()), ("math", math())):
        table = Dataset.from_list(rows)
        table.to_parquet(folder / f"{name}.parquet")
        table.to_json(folder / f"{name}.jsonl")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
