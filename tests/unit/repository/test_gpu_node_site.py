"""The Python packages of a pack: pins, rules, what is removed, and the check of what they require."""

import importlib.metadata
import os
import struct
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from grpo_devcluster.gpu_node import fatbin, pack, site, site_check, site_rules, site_trim
from grpo_devcluster.gpu_node.fatbin import Program
from grpo_devcluster.gpu_node.site_rules import PINS, RULES, Rules, own_wheels, read_pins, read_rules
from grpo_devcluster.paths import REPO
from grpo_devcluster.stages import StageError

PINNED = read_pins(PINS.read_text())
REAL = read_rules(RULES.read_text())
EMPTY = Rules((), {}, {}, (), (), (), 90, ())
WHEEL = "transformer_engine_torch-2.12.0-cp312-cp312-linux_x86_64.whl"


@cache
def _lock() -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = {}
    for package in tomllib.loads((REPO / "uv.lock").read_text())["package"]:
        found.setdefault(package["name"], []).append(package)
    return found


@pytest.mark.parametrize("pin", PINNED, ids=lambda pin: pin.name)
def test_a_pin_is_the_locks_or_says_why_not(pin: site_rules.Pin) -> None:
    entries = _lock().get(pin.name, [])
    same = [entry for entry in entries if entry["version"] == pin.version]
    assert same or not entries or pin.reason, f"uv.lock has another version of {pin.name}, and no reason why"
    assert not (same and pin.reason), f"{pin.name} is as in uv.lock: the reason is out of date"
    for entry in same:
        files = [*entry.get("wheels", ()), entry.get("sdist", {})]  # type: ignore[misc]
        assert pin.hash in [file.get("hash") for file in files]


def test_no_package_is_pinned_twice_or_named_for_two_reasons() -> None:
    names = [pin.name for pin in PINNED] + [name.partition("==")[0] for name in REAL.machine]
    names += [*REAL.left_out, *(wheel.name for wheel in REAL.own_wheels)]
    assert sorted(set(names)) == sorted(names)


def test_a_line_of_another_form_is_refused() -> None:
    with pytest.raises(StageError, match=r"'ray>=2' is not NAME==VERSION"):
        read_pins("# Ray\n\nray>=2\n")


def _package(folder: Path, name: str, version: str, *requires: str, extras: str = "") -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {text}" for text in requires)]
    lines += [f"Provides-Extra: {extras}"] if extras else []
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")


def test_all_that_the_project_requires_is_there_or_not_missed(tmp_path: Path) -> None:
    for pin in PINNED:
        _package(tmp_path, pin.name, pin.version)
    found = site_check.problems(tmp_path, REAL)
    assert [problem for problem in found if problem.startswith("grpo-operator")] == []


def _project(folder: Path, *requires: str) -> Path:
    """Return a repository that requires these packages."""
    text = f"[project]\ndependencies = {list(requires)}\noptional-dependencies.worker = []\n"
    (folder / "pyproject.toml").write_text(text)
    return folder


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    (tmp_path / "packages").mkdir()
    return tmp_path / "packages"


def test_what_is_not_there_or_has_another_version_is_named(tmp_path: Path, packages: Path) -> None:
    _package(packages, "a", "1.0", "b>=2", "Gone", "torch==2.14", 'old; python_version < "3.12"')
    _package(packages, "b", "1.0", "numpy<2")
    rules = replace(EMPTY, machine=("torch==2.11.0", "numpy"))
    assert site_check.problems(packages, rules, _project(tmp_path, "a")) == [
        "a requires Gone, which is neither packed nor on the machine",
        "a requires b>=2, but 1.0 is packed",
        "a requires torch==2.14, but the machine has 2.11.0",
    ]


def test_an_extra_counts_where_somebody_asks_for_it(tmp_path: Path, packages: Path) -> None:
    _package(packages, "ray", "1.0", 'colorful; extra == "default"', extras="default")
    missing = ['ray requires colorful; extra == "default", which is neither packed nor on the machine']
    assert site_check.problems(packages, EMPTY, _project(tmp_path, "ray")) == []
    assert site_check.problems(packages, EMPTY, _project(tmp_path, "ray[default]")) == missing
    _package(packages, "colorful", "1.0")
    assert site_check.problems(packages, EMPTY, _project(tmp_path, "ray[default]")) == []


def test_rules_excuse_what_they_name_and_nothing_unknown(tmp_path: Path, packages: Path) -> None:
    _package(packages, "sglang", "0.5.16", "IPython")
    repository = _project(tmp_path, "sglang==0.5.23")
    rules = replace(EMPTY, left_out={"ipython": "a stub"}, other_versions={"sglang": "an older torch"})
    assert site_check.problems(packages, rules, repository) == []
    rules = replace(rules, left_out=rules.left_out | {"wandb": "no network"})
    assert site_check.problems(packages, rules, repository) == [
        "nothing requires wandb: remove it from the rules"
    ]
    _package(packages, "wandb", "1.0", "sglang==0.5.23")
    assert site_check.problems(packages, rules, repository) == [
        "nothing requires wandb: remove it from the rules",
        "wandb is packed, and named as left out or the machine's",
        "wandb requires sglang==0.5.23, but 0.5.16 is packed",
    ]


def test_without_its_extension_transformer_engine_is_left_out_and_named(tmp_path: Path) -> None:
    assert own_wheels(REAL, None) == own_wheels(REAL, str(tmp_path)) == {}
    with pytest.raises(StageError, match=r"GRPO_GPU_NODE_WHEELS=.*/none is not a folder"):
        own_wheels(REAL, str(tmp_path / "none"))
    (sentence,) = site.missing(REAL, {})
    assert "transformer_engine_torch-2.12.0-cp312-*.whl" in sentence and "fp8-block128" in sentence
    without = {pin.name for pin in site.used_pins(PINNED, REAL, {})}
    assert {pin.name for pin in PINNED} - without == set(REAL.own_wheels[0].serves)
    (tmp_path / WHEEL).touch()
    found = own_wheels(REAL, str(tmp_path))
    assert found == {"transformer-engine-torch": tmp_path / WHEEL}
    assert site.missing(REAL, found) == [] and site.used_pins(PINNED, REAL, found) == PINNED


def test_a_folder_is_named_by_pins_and_wheels_and_packed_if_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_rules, "CACHE", tmp_path)
    monkeypatch.delenv("GRPO_GPU_NODE_SITE", raising=False)
    (tmp_path / WHEEL).write_text("1")
    wheels = {"x": tmp_path / WHEEL}
    folder = site_rules.folder_for(wheels)
    assert folder != site_rules.folder_for({})
    folder.with_suffix(".installing").mkdir(parents=True)
    assert pack._packages() is None
    folder.mkdir()
    assert pack._packages() == folder
    assert site.make(REAL, wheels) == folder  # which is there
    other = site_rules.folder_for({})
    other.mkdir()
    os.utime(folder, (1, 1))
    assert pack._packages() == other
    site.make(REAL, wheels)
    assert pack._packages() == folder
    monkeypatch.setenv("GRPO_GPU_NODE_SITE", "/mine")
    assert pack._packages() == Path("/mine")
    (tmp_path / WHEEL).write_text("2")
    assert site_rules.folder_for(wheels) != folder
    monkeypatch.setattr(site_rules, "_RECIPE", (RULES,))
    monkeypatch.delenv("GRPO_GPU_NODE_SITE")
    assert pack._packages() is None


def test_a_pattern_that_drops_nothing_is_out_of_date(tmp_path: Path) -> None:
    (tmp_path / "ray" / "jars").mkdir(parents=True)
    (tmp_path / "ray" / "a.pyi").touch()
    site_trim.drop(tmp_path, ["ray/jars", "**/*.pyi"])
    assert list((tmp_path / "ray").iterdir()) == []
    with pytest.raises(StageError, match=r"nothing in the packages fits 'ray/jars'"):
        site_trim.drop(tmp_path, ["ray/jars"])


def test_a_package_finds_the_files_of_its_record_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "found-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    (record.parent / "METADATA").write_text("Name: found\nVersion: 1.0\n")
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "libfound.so").touch()
    record.write_text(
        "found/libfound.so,sha256=x,3\nfound/dropped.so,sha256=x,3\nfound-1.0.dist-info/RECORD,,\n"
    )
    record.write_text(site_trim.plain_record(record.read_text(), tmp_path))
    assert record.read_text() == "found-1.0.dist-info/RECORD,,\nfound/libfound.so,,\n"
    monkeypatch.syspath_prepend(tmp_path)
    files = importlib.metadata.distribution("found").files
    assert files is not None and [str(file.locate()) for file in files if file.suffix == ".so"] == [
        str(tmp_path / "found" / "libfound.so")
    ]


def test_large_programs_and_libraries_lose_their_symbols(tmp_path: Path) -> None:
    elf = b"\x7fELF"
    (tmp_path / "gpu").mkdir()
    for name, start in (("a.so", elf), ("gpu/b.so", elf), ("raylet", elf), ("c.so", b"!")):
        (tmp_path / name).write_bytes(start + bytes(300_000))
    (tmp_path / "small.so").write_bytes(elf)
    assert site_trim.stripped(tmp_path, ["gpu/*"]) == [tmp_path / "a.so", tmp_path / "raylet"]


def _entry(kind: int, architecture: int, program: bytes) -> bytes:
    """Return an entry of a container with a header of 64 bytes."""
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(program)) + bytes(12) + struct.pack("<I", architecture)
    return head.ljust(64, b"h") + program


def _container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    whole = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
    return whole + bytes(-len(whole) % 8 + 8)


def _library(gpu_code: bytes) -> bytes:
    """Return a 64-bit ELF file of three sections: none, that of GPU code, and names."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    at = 64, 64 + len(gpu_code)
    table = at[1] + len(names)
    sections = [(0, 0, 0), (1, at[0], len(gpu_code)), (12, at[1], len(names))]
    rows = b"".join(struct.pack("<IIQQQQIIQQ", n, 1, 0, 0, o, size, 0, 0, 1, 0) for n, o, size in sections)
    head = b"\x7fELF".ljust(0x28, b"\0") + struct.pack("<Q10xHHH", table, 64, 3, 2)
    return head.ljust(64, b"\0") + gpu_code + names + rows


def test_programs_of_other_gpus_are_blank_and_nothing_moves(tmp_path: Path) -> None:
    ptx, code = 1, 2
    first = _container(_entry(ptx, 80, b"P" * 24), _entry(code, 80, b"A" * 32), _entry(code, 90, b"H" * 40))
    second = _container(_entry(code, 90, b"I" * 16), _entry(code, 100, b"B" * 16))
    file = tmp_path / "lib.so"
    expected = before = _library(first + second)
    for unused in (b"P" * 24, b"A" * 32, b"B" * 16):
        expected = expected.replace(unused, bytes(len(unused)))
    file.write_bytes(before)
    assert fatbin.prune(file, 90) == 24 + 32 + 16
    assert file.read_bytes() == expected != before
    assert fatbin.prune(file, 90) == 24 + 32 + 16 and file.read_bytes() == expected


def test_where_no_machine_code_fits_the_ptx_that_does_is_kept() -> None:
    old, new, code = Program(1, 80, 0, 8), Program(1, 100, 8, 8), Program(2, 80, 16, 8)
    assert fatbin.unused([old, new, code], 90) == [new, code]
