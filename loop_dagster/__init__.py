"""A self-hosted loop that keeps improving a model from what its users did with it.

Packages, from the bottom up (imports only ever go down):

    rules    pure functions, the loop's contract; no clock, disk, Dagster or torch
    tables   every Delta table, declared once
    store    registry (SQL), lake (Delta), leases, artifacts, intake
    models   what touches weights: train, answer, judge, serve
    partitions, jobs, then the top-level packages resources, assets, sensors
    definitions   the only place that puts things together

`cli` and `api` stand on `store` and `rules` and never on the Dagster folders.
"""
