"""Click logs as batches: sources of many file formats, and what lies behind them."""

from shardjax.data.arrow_files import arrow as arrow, parquet as parquet
from shardjax.data.batch import Batch as Batch
from shardjax.data.block_share import BlockShare as BlockShare
from shardjax.data.columns import infer_columns as infer_columns
from shardjax.data.criteo_files import criteo as criteo
from shardjax.data.csv_files import csv as csv
from shardjax.data.hashing import (
    MISSING_KEY as MISSING_KEY,
    hash_bytes as hash_bytes,
    hash_strings as hash_strings,
)
from shardjax.data.iterable import from_dicts as from_dicts
from shardjax.data.libsvm_files import libsvm as libsvm
from shardjax.data.loader import Loader as Loader
from shardjax.data.local_shuffle import LocalShuffle as LocalShuffle
from shardjax.data.permutation import Permutation as Permutation
from shardjax.data.schedule import Balance as Balance, BlockSchedule as BlockSchedule
from shardjax.data.share import Part as Part, Share as Share, share_of as share_of
from shardjax.data.shuffling import rebatch as rebatch, shuffle as shuffle
from shardjax.data.slot_files import slots as slots
from shardjax.data.source import (
    Indexable as Indexable,
    InMemory as InMemory,
    Source as Source,
)
from shardjax.data.split import (
    count_rows as count_rows,
    row_range as row_range,
    split_rows as split_rows,
)
from shardjax.data.synthetic import Synthetic as Synthetic
from shardjax.data.transport import DeviceExchange as DeviceExchange
