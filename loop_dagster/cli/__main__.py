"""`python -m loop_dagster.cli` is `loop`."""

from loop_dagster.cli import main

if __name__ == "__main__":
    main()
