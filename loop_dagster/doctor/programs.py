"""Python, the installed packages and what the operating system allows a process.

Belongs here: what must fit before any file of the installation is looked at. Does not belong here: settings.
"""

from __future__ import annotations

import importlib.metadata
import resource
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from loop_dagster.doctor.findings import Finding, fine, mistake, note, warning
from loop_dagster.doctor.installation import Installation
from loop_dagster.processes import PROJECT

#: Files that the daemon, its runs and the lake's readers hold open together.
LEAST_OPEN_FILES = 1_024


def python(_: Installation) -> Iterator[Finding]:
    yield python_fits(".".join(map(str, sys.version_info[:3])), _project()["requires-python"])


def python_fits(version: str, needed: str) -> Finding:
    """Whether a version of Python is one that the project takes."""
    if SpecifierSet(needed).contains(version):
        return fine("python", "Python", where=sys.executable, found=version)
    least = needed.removeprefix(">=")
    return mistake(
        "python",
        "Python",
        where=sys.executable,
        found=f"{version}, needed {needed}",
        mend=f"Make the environment again with one that fits: `rm -rf .venv && make PYTHON=python{least} venv` in "
        f"{PROJECT}. `apt install python{least} python{least}-venv` brings it on Debian and Ubuntu.",
    )


def packages(_: Installation) -> Iterator[Finding]:
    """Every requirement of pyproject.toml against what is installed; pins of constraints.txt as a note."""
    wrong = 0
    untested = []
    pins = _pins(PROJECT / "constraints.txt")
    needed = [Requirement(text) for text in _project()["dependencies"]]
    for requirement in needed:
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        found = _installed(requirement.name)
        problem = misfit(requirement, found)
        if problem is not None:
            wrong += 1
            yield problem
            continue
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is not None and found is not None and Version(found).public != Version(pin).public:
            untested.append(f"{requirement.name} {found} (tested with {pin})")
    if untested:
        yield note(
            "package_untested",
            "packages",
            where=str(PROJECT / "constraints.txt"),
            found=f"they fit, and the tests ran with others: {', '.join(untested)}",
            mend=f"Should anything behave oddly, install the tested ones: `make venv` in {PROJECT}.",
        )
    elif not wrong:
        yield fine("packages", "packages", found=f"{len(needed)} fit pyproject.toml")


def misfit(requirement: Requirement, found: str | None) -> Finding | None:
    """What is wrong with one installed package; None when it fits."""
    if found is not None and requirement.specifier.contains(found, prereleases=True):
        return None
    ask = shlex.quote(f"{requirement.name}{requirement.specifier}")
    pip = f"{shlex.quote(sys.executable)} -m pip install -c constraints.txt {ask}"
    return mistake(
        "package_version" if found else "package_missing",
        f"package {requirement.name}",
        where=f"{PROJECT / 'pyproject.toml'}, dependencies",
        found=f"{found or 'not installed'}, needed {requirement.specifier or 'any version'}",
        mend=f"`cd {shlex.quote(str(PROJECT))} && {pip}`",
    )


def limits(_: Installation) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= LEAST_OPEN_FILES or soft == resource.RLIM_INFINITY:
        yield fine("open_files", "open files", found=f"{soft:,} are allowed" if soft > 0 else "any number is allowed")
        return
    most = LEAST_OPEN_FILES * 4 if hard == resource.RLIM_INFINITY else hard
    yield warning(
        "open_files",
        "open files",
        where="this shell",
        found=f"a process may open {soft:,}, needed {LEAST_OPEN_FILES:,}",
        mend=f"`ulimit -n {max(most, LEAST_OPEN_FILES)}` in the shell, or LimitNOFILE= in the service's unit, before "
        "`loop run`.",
    )


def _project() -> Mapping[str, Any]:
    """Table `project` of pyproject.toml: the files of a clone may be newer than what was installed from them."""
    found: Mapping[str, Any] = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pins(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    lines = (line.partition("==") for line in path.read_text("utf-8").splitlines() if not line.startswith("#"))
    return {canonicalize_name(name): version for name, _, version in lines if version}
