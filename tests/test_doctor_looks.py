"""Single looks of the doctor where no installation is needed, and what keeps one of them from spoiling the rest."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from doctor_patient import SECRET, Patient
from packaging.requirements import Requirement

import loop_dagster.doctor
from loop_dagster.doctor import Check, Finding, examine
from loop_dagster.doctor.dagster_home import differing
from loop_dagster.doctor.findings import fine, mistake, told
from loop_dagster.doctor.home import NETWORK, mount_of
from loop_dagster.doctor.installation import Installation, kind_of
from loop_dagster.doctor.programs import misfit, python_fits
from loop_dagster.doctor.settings import nearest
from loop_dagster.settings import Settings
from loop_dagster.store.schema import leases

ROOT = Path(__file__).parent.parent


# the program


@pytest.mark.parametrize(("version", "level"), [("3.10.14", "mistake"), ("3.11.0", "fine"), ("3.13.1", "fine")])
def test_a_python_that_is_too_old_is_named_with_the_command(version: str, level: str) -> None:
    found = python_fits(version, ">=3.11")
    assert found.level == level
    if level == "mistake":
        assert found.found == "3.10.14, needed >=3.11"
        assert "`rm -rf .venv && make PYTHON=python3.11 venv`" in found.mend


def test_the_command_line_of_an_old_python_says_so_in_a_sentence() -> None:
    code = "import sys; sys.version_info = (3, 10, 4, 'final', 0); import loop_dagster.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed" in done.stderr
    assert "make PYTHON=python3.11 venv" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_package_that_does_not_fit_is_named_with_the_command(
    patient: Patient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "packages" / "polars-1.3.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: polars\nVersion: 1.3.0\n")
    monkeypatch.syspath_prepend(str(info.parent))
    found = patient.doctor()
    assert set(found.but_fine()) == {"package_version"}
    one = found.but_fine()["package_version"]
    assert one["found"].startswith("1.3.0, needed >=2")
    assert re.search(r"-m pip install -c constraints.txt 'polars>=[\d.]+'`", one["mend"])
    assert found.status == 1


def test_a_package_that_is_not_there_and_builds_of_the_right_one() -> None:
    missing = misfit(Requirement("no-such-package>=2"), None)
    assert missing is not None
    assert missing.code == "package_missing"
    assert misfit(Requirement("torch==2.13.0"), "2.13.0+cpu") is None
    assert misfit(Requirement("torch==2.13.0"), "2.12.9") is not None


def test_too_few_open_files_are_named(patient: Patient) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        named = patient.doctor().but_fine()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert set(named) == {"open_files"}
    assert "`ulimit -n " in named["open_files"]["mend"]


def test_the_doctor_loads_no_torch_and_no_model(patient: Patient) -> None:
    code = (
        "import sys\nfrom loop_dagster.cli import main\nsys.argv = ['loop', 'doctor']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print('status', end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "status 0 False", done.stdout + done.stderr


# names


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("LOOP_SERV_PORT", "LOOP_SERVE_PORT"),
        ("LOOP_JUDGE_KEY", "LOOP_JUDGE_API_KEY"),
        ("LOOP_REGISTRY", "LOOP_REGISTRY_URL"),
        ("LOOP_HOEM", "LOOP_HOME"),
        ("LOOP_WEBSERVER_PROT", "LOOP_WEBSERVER_PORT"),
        ("LOOP_ENTIRELY_DIFFERENT", None),
    ],
)
def test_the_nearest_name_is_what_was_meant(given: str, meant: str | None) -> None:
    assert nearest(given, {f"LOOP_{name.upper()}" for name in Settings.model_fields}) == meant


def test_differences_have_dotted_names() -> None:
    found = {"a": 1, "b": {"c": 2, "d": [1]}, "e": None}
    assert differing(found, {"a": 1, "b": {"c": 3, "d": [1], "f": 1}}) == ["b.c", "b.f", "e"]
    assert differing(found, found) == []


# places

MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
server:/export /mnt/share nfs4 rw,vers=4.2 0 0
/dev/sdb1 /mnt/share/local xfs rw 0 0
C:\\\\ /mnt/c 9p rw,aname=drvfs;path=C:\\\\ 0 0
//nas/data /mnt/with\\040space cifs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/home/a/.loop/registry.db", "ext4", False),
        ("/mnt/share/loop/registry.db", "nfs4", True),
        ("/mnt/share/local/registry.db", "xfs", False),
        ("/mnt/sharepoint/registry.db", "ext4", False),
        ("/mnt/c/Users/a/.loop/registry.db", "drvfs", True),
        ("/mnt/with space/registry.db", "cifs", True),
    ],
)
def test_the_file_system_of_a_path(path: str, kind: str, network: bool) -> None:
    found = mount_of(Path(path), MOUNTS)
    assert found is not None
    assert (found.kind, found.kind in NETWORK) == (kind, network)
    assert mount_of(Path(path), "") is None


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("python -m dagster._daemon run -w workspace.yaml", "daemon"),
        ("/venv/bin/python /venv/bin/dagster-daemon run", "daemon"),
        ("python -m dagster_webserver -h 127.0.0.1", "ui"),
        ("python -m loop_dagster.models.serve", "serving"),
        ("python -m dagster dev -w workspace.yaml", "other"),
        ("python -m loop_dagster.cli serve --port 8765", "api"),
        ("/venv/bin/python /venv/bin/loop serve", "api"),
        ("python train.py run", "other"),
    ],
)
def test_what_a_process_is(command: str, kind: str) -> None:
    assert kind_of(command.split()) == kind


# depth


def test_only_a_thorough_look_reads_every_byte(patient: Patient) -> None:
    data = next((patient.home / "lake" / "default" / "samples").glob("*.parquet"))
    whole = data.read_bytes()
    data.write_bytes(whole[:4] + bytes(36) + whole[40:])  # the head of the first page
    assert patient.doctor().but_fine() == {}
    named = patient.doctor("--thorough").but_fine()
    assert set(named) == {"lake_torn"}
    assert named["lake_torn"]["where"] == str(data)
    status, text, errors = patient.loop("samples", "list", "--json")
    assert (status, json.loads(text)["error"]["code"]) == (5, "LAKE_UNREADABLE")
    assert "`loop doctor --thorough`" in json.loads(text)["error"]["message"]
    assert errors == ""


# one look and the others


def _hangs(_: Installation) -> Iterator[Finding]:
    threading.Event().wait(5)
    yield fine("late", "late", found="late")


def _breaks(_: Installation) -> Iterator[Finding]:
    yield fine("first", "first", found="well")
    raise ZeroDivisionError(SECRET)


def _full(_: Installation) -> Iterator[Finding]:
    raise OSError(28, os.strerror(28), "/some/place")


def _last(_: Installation) -> Iterator[Finding]:
    yield fine("last", "last", found="well")


def test_a_look_that_hangs_or_breaks_is_named_and_the_others_go_on(patient: Patient) -> None:
    checks = [Check(look.__name__, look, "nothing") for look in (_hangs, _breaks, _full, _last)]
    found = list(examine(checks=checks, limit_s=0.2))
    assert [(one.code, one.level) for one in found] == [
        ("no_answer", "warning"),
        ("first", "fine"),
        ("look_failed", "warning"),
        ("not_readable", "mistake"),
        ("last", "fine"),
    ]
    assert "ZeroDivisionError" in found[2].found
    assert SECRET not in str(found)
    assert "No space left on device (/some/place)" in found[3].found


def test_a_finding_says_how_to_mend_it_unless_it_is_fine() -> None:
    with pytest.raises(ValueError, match="how to mend"):
        mistake("code", "what", found="wrong", mend="")
    found = told("code", "what", "The model is broken. Nothing was done. Put it back.")
    assert (found.found, found.mend) == ("The model is broken. Nothing was done", "Put it back.")


def test_every_code_stands_in_the_manual() -> None:
    manual = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    folder = Path(loop_dagster.doctor.__file__).parent
    codes = set()
    for path in folder.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        codes |= set(re.findall(r"\b(?:mistake|warning|note|told|make)\(\s*\"([a-z_]+)\"", text))
        codes |= set(re.findall(r"\"((?:registry|template|artifact|package|model)_[a-z]+)\" (?:if|else)", text))
    assert len(codes) > 60
    assert {code for code in codes if f"`{code}`" not in manual} == set()


def test_what_a_killed_worker_left_of_an_attempt_that_has_ended_is_no_matter(patient: Patient) -> None:
    store = patient.open()
    [attempt] = store.attempts.list()
    store.leases.take(f"attempt/{attempt.run_id}")
    with store.registry.write() as connection:
        connection.execute(sa.update(leases).values(heartbeat_at=datetime.now(UTC) - timedelta(hours=2)))
    assert patient.doctor().but_fine() == {}
