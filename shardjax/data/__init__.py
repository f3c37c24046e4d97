"""Click logs as batches: sources of many file formats, and what lies behind them."""

from shardjax.data.arrow_files import arrow as arrow, parquet as parquet
from shardjax.data.batch import Batch as Batch
from shardjax.data.columns import infer_columns as infer_columns
from shardjax.data.criteo_files import criteo as criteo
from shardjax.data.csv_files import csv as csv
from shardjax.data.hashing import (
    MISSING_KEY as MISSING_KEY,
    hash_bytes as hash_bytes,
    hash_strings as hash_strings,
)
from shardjax.data.source import InMemory as InMemory, Source as Source
