"""`token_counts`: how long the long samples are, counted once by a child process that has the model's tokenizer."""

import json

import dagster as dg
import polars as pl

from assets.children import run_child
from assets.steps import StepRun, utc_now
from loop_dagster.models.lengths import LengthsJob, LengthsResult
from loop_dagster.opening import base_of, frozen_length, frozen_pipeline
from loop_dagster.store.selecting import Length, keep_counts, uncounted_pairs
