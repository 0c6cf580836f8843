"""A process that scores until it is done or killed: `python scoring_child.py HOME URL PIPELINE_ID`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from scoring_world import PRICES, run, settings_of

from loop_dagster.store.open import open_store


def main() -> None:
    home, url, pipeline_id = sys.argv[1:]
    store = open_store(settings_of(Path(home), url, **PRICES))
    run(store, store.pipelines.get(pipeline_id))


if __name__ == "__main__":
    main()
