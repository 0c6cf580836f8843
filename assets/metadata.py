"""What every asset shows of itself in Dagster's UI, derived from the table declarations."""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from loop_dagster.report_words import got, needed
from loop_dagster.rules.decision import Bar
from loop_dagster.tables import Table


def column_schema(table: Table) -> dg.TableSchema:
    """The declared columns with their meaning, as Dagster shows them."""
    return dg.TableSchema(
        columns=[
            dg.TableColumn(
                name=column.name,
                type=str(column.dtype),
                description=column.meaning,
                constraints=dg.TableColumnConstraints(
                    nullable=column.nullable, other=["one of " + ", ".join(column.words)] if column.words else []
                ),
            )
            for column in table.columns
        ],
        constraints=dg.TableConstraints(other=["key: " + ", ".join(table.key)]),
    )


def definition_metadata(table: Table) -> dict[str, Any]:
    """Metadata of the asset itself: schema and name of the Delta table."""
    return {"dagster/column_schema": column_schema(table), "dagster/table_name": table.name}


def written(table: Table, *, rows: int, version: int | None) -> dict[str, Any]:
    """Metadata of one materialisation: rows written and the Delta version that holds them."""
    return {
        "dagster/row_count": rows,
        "delta_table": table.name,
        "delta_version": version if version is not None else -1,
    }


def last_shown(instance: dg.DagsterInstance, asset: str, name: str) -> Any:
    """A metadata value of the asset's newest materialisation; None where there is none."""
    event = instance.get_latest_materialization_event(dg.AssetKey(asset))
    materialization = event.asset_materialization if event else None
    value = materialization.metadata.get(name) if materialization else None
    return value.value if value else None


def records_table(rows: Sequence[Mapping[str, Any]]) -> dg.TableMetadataValue:
    """Rows of plain values as a table; floats rounded so that a person can read them."""
    shown = [{key: _shown(value) for key, value in row.items()} for row in rows]
    names = list(shown[0]) if shown else ["-"]
    schema = dg.TableSchema(columns=[dg.TableColumn(name=name, type="string") for name in names])
    return dg.MetadataValue.table(records=[dg.TableRecord(row) for row in shown], schema=schema)


def bars_table(bars: Sequence[Bar]) -> dg.TableMetadataValue:
    """The bars of a report, in the words of the report's page."""
    return records_table([bar.as_dict() | {"needed": needed(bar), "got": got(bar)} for bar in bars])


def _shown(value: Any) -> str | int | bool:
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else str(value)
