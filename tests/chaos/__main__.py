"""`make chaos`: 50 rounds of every kind of kill against real processes; `python tests/chaos --rounds 2 import drain`.

Most of a round waits for leases to end, so `--at-once 3` keeps two cores busy. A round that fails is named with its
seed and the others go on; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import kills
import load
from homes import Homes, postgres

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))

import tiny


def main() -> int:
    """Run the rounds and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "kinds",
        nargs="*",
        help="daemon, worker, child, power, two (daemons), cancel, import, drain, load; all if none is named",
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=1, help="rounds beside each other, each in its home")
    parser.add_argument("--postgres", action="store_true", help="with registries on a PostgreSQL server")
    chosen = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="loop-chaos-", ignore_cleanup_errors=True))
        )
        homes = Homes(folder, stack.enter_context(postgres()) if chosen.postgres else None)
        rounds: dict[str, kills.Round] = {
            "import": partial(kills.kill_an_import, homes),
            "drain": partial(kills.kill_a_drain, homes),
            "load": partial(load.kill_under_load, homes),
        }
        attempts = {"two", "cancel", "power", *kills.MARKS}
        kinds = chosen.kinds or ["import", "drain", "load", *sorted(attempts)]
        if attempts & set(kinds):
            template = kills.template_home(homes, tiny.tiny_model(folder / "model"), _conversations(folder))
            for target in kills.MARKS:
                rounds[target] = partial(kills.kill_in_an_attempt, homes, template, target)
            rounds["cancel"] = partial(kills.cancel_in_an_attempt, homes, template)
            rounds["power"] = partial(kills.cut_the_power, homes, template)
            rounds["two"] = partial(kills.two_daemons, homes, template)
        seeds = range(chosen.first_seed, chosen.first_seed + chosen.rounds)
        with ThreadPoolExecutor(chosen.at_once) as pool:
            held = list(pool.map(lambda one: _held(rounds, *one), [(kind, seed) for seed in seeds for kind in kinds]))
    failed = held.count(False)
    print(f"{failed} rounds failed." if failed else "Every round held.")
    return 1 if failed else 0


def _held(rounds: dict[str, kills.Round], kind: str, seed: int) -> bool:
    """One round, and its line."""
    began = time.monotonic()
    try:
        said = rounds[kind](seed)
    except Exception as error:  # two attempts where one should be, say, or a process that did not end in time
        said = f"FAILED: {type(error).__name__}: {error}"
    print(f"{kind:<7} seed {seed:<3} {time.monotonic() - began:6.1f} s  {said}", flush=True)
    return not said.startswith("FAILED")


def _conversations(folder: Path) -> Path:
    """1,100 conversations that the tiny model can learn from."""
    path = folder / "facts.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for fact in tiny.facts(220, seed=1):
            for form in range(len(tiny.FORMS)):
                messages, answer = tiny.conversation(fact, form)
                file.write(json.dumps({"messages": [*messages, answer]}) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
