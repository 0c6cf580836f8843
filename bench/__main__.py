"""`python -m bench`: every benchmark, one after the other, each in a process of its own, then one table.

Run it on a machine that does nothing else. `--quick` makes every one small: to see that they run, not to quote.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.table import COLLECT, read, show

#: Benchmark → its arguments for a quick look.
BENCHES: dict[str, list[str]] = {
    "import_speed": ["--rows", "5000", "--repeats", "1"],
    "minimums": ["--rows", "50000", "--files", "1", "20", "--repeat", "1"],
    "list_and_search": ["--rows", "50000", "--repeat", "1"],
    "capture_speed": ["--seconds", "2", "--rounds", "1"],
    "loop_speed": [],
    "training_speed": ["--rows", "24", "--repeat", "1"],
    "answering_speed": ["--questions", "20", "--repeat", "1"],
    "judge_speed": ["--samples", "40", "--repeat", "1"],
    "dataset_export": ["--samples", "4000", "--small", "1000"],
    "start_latency": ["--pipelines", "1", "--repeat", "1"],
    "gateway_overhead": ["--calls", "60", "--repeat", "1"],
}
#: Run only when named: half an hour each.
LONG: dict[str, list[str]] = {"simulated_year": ["--samples", "12000", "--attempts", "4"]}


def main() -> int:
    """Run the benchmarks that are named, or all; returns 1 if one of them could not run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", choices=[[], *BENCHES, *LONG], help="run only these")
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    failed = []
    with tempfile.TemporaryDirectory(prefix="loop-bench-") as folder:
        lines = Path(folder) / "lines.jsonl"
        environment = {**os.environ, COLLECT: str(lines), "PYTHONPATH": str(root)}
        for name in chosen.only or BENCHES:
            print(f"\n== {name}", flush=True)
            quick = {**BENCHES, **LONG}[name] if chosen.quick else []
            command = [sys.executable, "-m", f"bench.{name}", *quick]
            if subprocess.run(command, env=environment, check=False).returncode:
                failed.append(name)
        print("\n" + show(read(lines)))
    for name in failed:
        print(f"{name} did not finish; its output above says why.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
