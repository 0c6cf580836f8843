"""Great Expectations suites, derived from the table declarations; they look at keys and words, never at text."""

from typing import Any

import polars as pl

from loop_dagster.tables import Table

#: At most this many changed rows are validated in one run (0.2 s).
MOST_ROWS = 200_000


def validate(table: Table, frame: pl.DataFrame) -> tuple[bool, dict[str, Any]]:
    """Validate changed rows against the table's suite: whether all hold, and metadata with what failed.

    `frame` holds any of the table's columns; text columns are left out even when they are there.
    """
    import great_expectations as gx  # 3 s to import, so not before it is needed

    columns = [column for column in table.columns if column.kind != "text" and column.name in frame.columns]
    rows = frame.select([column.name for column in columns]).tail(MOST_ROWS)
    context = gx.get_context(mode="ephemeral")
    context.enable_analytics(False)
    context.variables.progress_bars = {"globally": False, "metric_calculations": False}
    asset = context.data_sources.add_pandas("lake").add_dataframe_asset(table.name)
    batch = asset.add_batch_definition_whole_dataframe("changed rows").get_batch({"dataframe": rows.to_pandas()})
    suite = gx.ExpectationSuite(name=table.name)
    for column in columns:
        if not column.nullable:
            suite.add_expectation(gx.expectations.ExpectColumnValuesToNotBeNull(column=column.name))
        if column.words:
            suite.add_expectation(
                gx.expectations.ExpectColumnValuesToBeInSet(column=column.name, value_set=list(column.words))
            )
    if len(table.key) == 1:
        suite.add_expectation(gx.expectations.ExpectColumnValuesToBeUnique(column=table.key[0]))
    else:
        suite.add_expectation(gx.expectations.ExpectCompoundColumnsToBeUnique(column_list=list(table.key)))
    result = batch.validate(suite)
    failed = [
        f"{one.expectation_config.type} on {one.expectation_config.kwargs.get('column', table.key)}: "
        f"{one.result.get('unexpected_count', 'all')} rows"
        for one in result.results
        if not one.success
    ]
    return bool(result.success), {"rows_validated": rows.height, "expectations": len(result.results), "failed": failed}
