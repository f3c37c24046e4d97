"""Embedding tables partitioned over a mesh.

What there is, by the order in which one needs it:

Say what is embedded
    TableSpec        a table: dim, optimizer, capacity or vocabulary, who gets a row
    FeatureSpec      a feature that reads a table: combiner, padding, bad ids
    Jagged, as_keys  bags of keys; any integers as uint64 keys
    uniform, zeros   initializers of rows
    rowwise_adagrad  a row optimizer; others come from optax (RowOptimizerError: not this one)

Who gets a row (`admit` of a table)
    Always, MinCount, Probability        (Admission: any of them)
Who leaves for good (`evict` of a table)
    Never, TTL, LRU, LFU, ShowClick      (Eviction: any of them)

Where rows lie
    Storage          rows on the devices, in RAM and on disk

Use it
    EmbeddingCollection   tables and features over a mesh: plan, load_rows, lookup_rows,
                          export, keys, stats, shrink, close
    EmbeddingState        what the devices hold, a SlabState per slab
    TableRows             rows on the host, as `export` gives them
    Plan, PlanError       a batch made ready; why one could not be
    Sequence              what a model gets of a feature with combiner "none"
    split_features, sequence_masks    blocks of vectors to features, in a step of your own
    Index                 keys to numbers, 64 bits, in the order in which they are first met

Inside jit
    init_device_table     a DeviceTable: keys to slots, on the devices
    device_table          its functions: find, find_or_insert, erase, export
    split_keys, join_keys    uint64 keys to pairs of uint32 words, and back

Inside of a model, which looks its tables up itself
    Embed, EmbeddingBag   in the place of nnx.Embed; those of linen: shardjax.embed.linen
    table_paths, Table    the tables of a model; their variable
    plan_tables, TablePlan, TableState, RowGradients    to train only the rows looked up
    DeviceVocabulary, Keys, keys_for    rows for keys of 64 bits, as they come

House dims of the shapes in docstrings: batch, examples (of one device), values (ids), rows
(unique), slots, dim, devices.
"""

from shardjax.embed import device_table as device_table
from shardjax.embed.collection import (
    EmbeddingCollection as EmbeddingCollection,
    EmbeddingState as EmbeddingState,
)
from shardjax.embed.device_table import (
    DeviceTable as DeviceTable,
    init_device_table as init_device_table,
)
from shardjax.embed.exchange import (
    Sequence as Sequence,
    sequence_masks as sequence_masks,
    split_features as split_features,
)
from shardjax.embed.index import Index as Index
from shardjax.embed.jagged import Jagged as Jagged, as_keys as as_keys
from shardjax.embed.key_words import join_keys as join_keys, split_keys as split_keys
from shardjax.embed.module import (
    Embed as Embed,
    EmbeddingBag as EmbeddingBag,
    Table as Table,
    table_paths as table_paths,
)
from shardjax.embed.moves import SlabState as SlabState
from shardjax.embed.optimizers import (
    RowOptimizerError as RowOptimizerError,
    rowwise_adagrad as rowwise_adagrad,
)
from shardjax.embed.plan import Plan as Plan, PlanError as PlanError
from shardjax.embed.policies import (
    LFU as LFU,
    LRU as LRU,
    TTL as TTL,
    Admission as Admission,
    Always as Always,
    Eviction as Eviction,
    MinCount as MinCount,
    Never as Never,
    Probability as Probability,
    ShowClick as ShowClick,
)
from shardjax.embed.spec import (
    FeatureSpec as FeatureSpec,
    TableSpec as TableSpec,
    uniform as uniform,
    zeros as zeros,
)
from shardjax.embed.storage import Storage as Storage
from shardjax.embed.table_plan import (
    RowGradients as RowGradients,
    TablePlan as TablePlan,
    TableState as TableState,
)
from shardjax.embed.table_planning import plan_tables as plan_tables
from shardjax.embed.table_rows import TableRows as TableRows
from shardjax.embed.vocabulary import (
    DeviceVocabulary as DeviceVocabulary,
    Keys as Keys,
    keys_for as keys_for,
)
