"""The loop's rules as pure functions: frames, clock and seed come in, frozen dataclasses go out.

Nothing in here reads a clock, a disk, an environment variable or a network, and nothing imports Dagster, deltalake or
torch; import-linter holds that. The source of every rule is the project's rules page (docs/rules.md).
"""
