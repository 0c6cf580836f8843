"""Sensors: thin, each calls one function that computes what changed. A failed read is never an empty read."""
