"""The GPU's kernel computes the same sums as the CPU; Triton's interpreter runs it here."""

import json
import subprocess
import sys

import pytest
import torch

from grpo_worker.weightsync.protocol.fingerprint import checks

SIZES = (0, 5, 8, 4096 * 8, 3 * 4096 * 8 + 77 * 8 + 3, 2 * 4096 * 8 - 8)
PROGRAM = """
import json, sys, torch
from grpo_worker.weightsync.protocol import fingerprint, fingerprint_triton
sums = []
for size in json.loads(sys.argv[1]):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    weighted, signed = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    fingerprint_triton.add_sums(data, weighted, signed, fingerprint._ROW, fingerprint._WEIGHT)
    sums.append([weighted.item() ^ size, signed.item()])
print(json.dumps(sums))
"""


def test_the_kernel_computes_what_the_cpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    command = [sys.executable, "-c", PROGRAM, json.dumps(SIZES)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = []
    for size in SIZES:
        generator = torch.Generator().manual_seed(size)
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        expected.append([int(value) for value in checks(data)])
    assert json.loads(answer.stdout) == expected
