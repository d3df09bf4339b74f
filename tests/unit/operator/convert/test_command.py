"""The command ``grpo-convert``: streams, exit codes and inherited configurations."""

import json
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml

from grpo_devcluster.paths import REPO
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.cli.convert import main, texts_of
from grpo_operator.cli.kubectl import main as plugin

SCRIPT = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
  data.train_files=$HOME/gsm8k/train.parquet trainer.default_hdfs_dir=a actor_rollout_ref.rollout.n=%s \\
  actor_rollout_ref.model.path=Qwen/Qwen3-8B trainer.nnodes=$NODES $@
"""


def _script(folder: Path, samples: str = "8") -> str:
    (folder / "run.sh").write_text(SCRIPT % samples)
    return str(folder / "run.sh")


def test_the_manifest_goes_to_stdout_and_the_lists_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([_script(tmp_path), "--define", "NODES=1", "--name", "mine", "--steps", "50"]) == 0
    out, err = capsys.readouterr()
    manifest = yaml.safe_load(out)
    assert manifest["kind"] == "GRPOJob" and manifest["metadata"] == {"name": "mine"}
    assert GRPOJobSpec.model_validate(manifest["spec"]).total_steps == 50
    titles = [line.split(":")[0] for line in err.splitlines() if not line.startswith(" ")]
    assert titles == ["Taken over", "Chosen, because the source does not say it", "Without counterpart"]
    assert main([_script(tmp_path), "--define=NODES=1", "-o", "json", "--from", "verl"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "GRPOJob"


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        ("8", [], "trainer.nnodes=${NODES}: line 3: the script does not set NODES: add --define NODES=VALUE"),
        ("many", ["--define=NODES=1"], "actor_rollout_ref.rollout.n=many: write a whole number"),
        ("8", ["--define=NODES=1", "--strict"], "trainer.default_hdfs_dir=a: set checkpoint.store"),
        ("8", ["--define=NODES=1", "--reward=poem"], "--reward=poem: write math, code, json, choice, /FILE"),
    ],
)
def test_an_error_names_option_value_and_remedy(
    samples: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([_script(tmp_path, samples), *options]) == 1
    out, err = capsys.readouterr()
    assert not out and f"grpo-convert: {message}" in err


def test_the_program_of_its_own_and_the_plugin_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]["grpo-convert"]
    program = EntryPoint("grpo-convert", value, "console_scripts").load()
    arguments = [_script(tmp_path), "--define=NODES=1"]
    monkeypatch.setattr(sys, "argv", ["grpo-convert", *arguments])
    assert program() == 0
    converted = capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["kubectl-grpo", "convert", *arguments])
    with pytest.raises(SystemExit, match="0"):
        plugin.main()
    assert capsys.readouterr() == converted and "kind: GRPOJob" in converted.out
    monkeypatch.setattr(sys, "argv", ["kubectl-grpo", "convert", *arguments, "--reward=poem"])
    with pytest.raises(SystemExit, match="1"):
        plugin.main()
    assert capsys.readouterr().err.startswith("kubectl grpo convert: --reward=poem")


def test_unknown_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert main([str(tmp_path / "notes.txt")]) == 1
    assert "of no known framework: add --from verl" in capsys.readouterr().err
    assert main([str(tmp_path / "missing.sh")]) == 1
    assert "missing.sh" in capsys.readouterr().err


def test_configurations_inherit_from_files_beside_them(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "base.yaml").write_text("grpo: {a: 1}\n")
    (tmp_path / "inner" / "middle.yaml").write_text("defaults: ../base.yaml\ngrpo: {a: 2}\n")
    (tmp_path / "inner" / "top.yaml").write_text("defaults: middle.yaml\ngrpo: {a: 3}\n")
    texts = texts_of(tmp_path / "inner" / "top.yaml")
    assert [yaml.safe_load(text)["grpo"]["a"] for text in texts] == [1, 2, 3]
    (tmp_path / "base.yaml").write_text("defaults: base.yaml\ngrpo: {}\n")
    with pytest.raises(ValueError, match="in a circle"):
        texts_of(tmp_path / "base.yaml")
