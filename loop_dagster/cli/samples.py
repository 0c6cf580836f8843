"""`loop samples` and `loop feedback`: what is there, what each sample is worth, and saying so."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import polars as pl
import typer
from uuid_utils import uuid7

from loop_dagster.cli.context import now, opened
from loop_dagster.cli.output import AsJson, emit_json, out, table
from loop_dagster.errors import BadRequest, NotFound
from loop_dagster.opening import length_of, base_of
from loop_dagster.rules import feedback as verdicts
from loop_dagster.rules.canonical import canonical_json, hash_key
from loop_dagster.rules.redaction import redact
from loop_dagster.store.open import Store
from loop_dagster.store.selecting import states_of
from loop_dagster.wire import timestamp

app = typer.Typer(no_args_is_help=True)

Verdict = Literal["good", "bad", "corrected", "gold"]
#: Words of every door → stored word.
STORED = {"good": "accepted", "bad": "rejected", "corrected": "edited", "gold": "gold"}
