"""The HTTP API: one FastAPI app over the stores and rules (docs/api.md).

Belongs here: reading requests, who may do what, answers in the wire's field names. Does not belong here: any rule, any
statement, Dagster. `app.py` puts it together, `routers/` has one module per resource, `rows/` makes the answers.
"""
