"""Train the published models' directories, shrunk in size only, as whole jobs in the embedded cluster.

    own_models.py [MODEL/FORM ...]

Every model in every form: as published, saved by transformers 4, saved by transformers 5. Each job takes
three steps on rows in verl's layouts with the model's chat template, and exports. Every export must load and
answer in transformers. A stock SGLang serves one form of each model too, and must continue with the same
tokens. Writes benchmarks/results/own_models_jobs.json, job by job, so that a run may cover a part of the
matrix; benchmarks/results/own_models.json counts the jobs in it. Exits with 1 if a job failed.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_devcluster import cluster
from grpo_devcluster.addons import kubectl
from grpo_devcluster.follow import JobView
from grpo_devcluster.install import devcluster_values, install_operator
from grpo_devcluster.paths import JOB_DATA, KUBECONFIG, REPO
from grpo_devcluster.report import GAP, load
from grpo_devcluster.results import RESULTS, record, record_cases

sys.path.insert(0, str(REPO / "tests"))

from support import sglang_server
from support.published_models import directory as published
from support.published_models import job as own_model
from support.ranks.launcher import run as run_on_ranks

ROOT = JOB_DATA / "own-models"
STAGES = {"pipeline": 2}
DENSE = ({"tensor": 2, "expertTensor": 2}, STAGES, {"tensor": 1})
EXPERTS = ({"tensor": 2, "expert": 2}, STAGES, {"expert": 2})
DATA = ("gsm8k.parquet", "gsm8k.jsonl", "math.parquet", "math.jsonl")
JOBS = RESULTS / "own_models_jobs.json"
ENDED = frozenset({"Succeeded", "Failed"})


def main() -> None:
    """Run the matrix, or the forms named as arguments, and record the figures."""
    matrix = [f"{model}/{form}" for form in published.GENERATIONS[::-1] for model in published.MODELS]
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=matrix, metavar="MODEL/FORM")
    names = parser.parse_args().names
    if unknown := set(names) - set(matrix):
        parser.error(f"no such form: {', '.join(sorted(unknown))}; there are {', '.join(matrix)}")
    cluster.prepare()
    install_operator(KUBECONFIG, devcluster_values(cluster.up()))
    try:
        passed = [_run(name, number) for number, name in enumerate(matrix) if name in names]
    finally:
        cluster.down()
    record("own_models", {"export_roundtrip_max_logit_diff": _round_trip()})
    if not all(passed):
        sys.exit(f"{passed.count(False)} of {len(passed)} jobs failed")


def _run(name: str, number: int) -> bool:
    """Run one job, add its result to the file, and return whether it passed."""
    model, form = name.split("/")
    data, serve = DATA[number % len(DATA)], number % len(published.GENERATIONS) == 0
    try:
        problem = _job(f"own-{number}", model, form, data, number, serve)
    except Exception as error:  # noqa: BLE001 - a job that fails is a result
        problem = f"{type(error).__name__}: {error}"[:600]
    print(f"{name:<40}{data:<15}{problem or 'ok'}", flush=True)
    record_cases("own_models_jobs", {name: {"result": problem or "ok", "data": data, "served": serve}})
    jobs = json.loads(JOBS.read_text())["cases"]
    good = [job for job in jobs.values() if job["result"] == "ok"]
    figures = {
        "published_models_ok": len(good),
        "published_models_of": len(jobs),
        "published_models_served_by_sglang": sum(job["served"] for job in good),
        "data_layouts_ok": len({job["data"] for job in good}),
    }
    record("own_models", figures)
    return not problem


def _job(name: str, model: str, form: str, data: str, number: int, serve: bool) -> str:
    """Run one job and load its export in both readers; return the problem, or an empty string."""
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir(parents=True)
    own_model.write_files(ROOT, model, form)
    layouts = DENSE if "-8B" in model else EXPERTS
    spec = own_model.job_spec(ROOT, model, layouts[number % len(layouts)])
    spec["data"]["train"] = f"/data/{data}"
    if data.startswith("math"):
        spec["reward"] = {"builtin": "math"}
    manifest = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())
    manifest["metadata"]["name"], manifest["spec"] = name, spec
    file = ROOT / "job.yaml"
    file.write_text(yaml.safe_dump(manifest))
    kubectl("apply", "-f", str(file), kubeconfig=KUBECONFIG)
    job = JobView(KUBECONFIG, name)
    try:
        status = job.wait(ENDED, 600, verbose=False)
        if status["phase"] != "Succeeded":
            return str(next(c["message"] for c in status["conditions"] if c["type"] == "Failed"))
        store = JOB_DATA / f"default-{name}-{job.get()['metadata']['uid'][:8]}"
        return _checked(store, serve)
    finally:
        job.kubectl("delete", "grpojob", name, "--cascade=foreground")


def _checked(store: Path, serve: bool) -> str:
    records = load(store)
    if [r["step"] for r in records] != [1, 2, 3]:
        return f"steps {[r['step'] for r in records]}"
    if max(r[GAP] for r in records) > 1e-4:
        return f"log-probabilities differ by {max(r[GAP] for r in records)}"
    export = store / "export" / "step-00000003"
    tokenizer = AutoTokenizer.from_pretrained(export)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 6 times 7?"}], add_generation_prompt=True, return_dict=False
    )
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    answer = model.generate(
        torch.tensor([ids]), max_new_tokens=6, min_new_tokens=6, do_sample=False, top_k=None, top_p=None
    )[0, len(ids) :].tolist()
    if not serve:
        return ""
    with sglang_server.serving(export, store / "sglang") as url:
        served = sglang_server.greedy(url, ids, 6)
    return "" if served == answer else f"SGLang continues with {served}, transformers with {answer}"


def _round_trip() -> float:
    """Return the largest difference of logits between a trainer and transformers on its export."""
    return max(_difference(model) for model in ("deepseek_v3", "qwen3", "qwen3_moe"))


def _difference(model: str) -> float:
    with tempfile.TemporaryDirectory() as root:
        arguments: dict[str, Any] = {"root": root, "model": model, "layout": STAGES, "source": None}
        found = run_on_ranks("export_cases:round_trip", 2, **arguments)
    if not all(rank["reloaded"] for rank in found):
        raise AssertionError(f"{model}: the export holds other weights")
    return float(max(rank["difference"] for rank in found if rank["difference"] is not None))


if __name__ == "__main__":
    started = time.monotonic()
    main()
    print(f"{time.monotonic() - started:.0f} s")
