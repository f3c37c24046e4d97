"""Click logs as batches: sources of many file formats, and what lies behind them."""

from shardjax.data.batch import Batch as Batch
from shardjax.data.hashing import MISSING_KEY as MISSING_KEY
from shardjax.data.hashing import hash_bytes as hash_bytes
from shardjax.data.hashing import hash_strings as hash_strings
