"""Dagster assets of the loop, one module per stage.

An asset body reads, calls a rule, writes and returns a MaterializeResult with counts, the Delta version and a picture
where one helps; it branches on no domain fact and never shows a sample's text.
"""
