"""Embedding tables partitioned over a mesh. House dims of the shapes in docstrings:
batch, examples (of one device), values (ids), rows (unique), slots, dim, devices."""

from shardjax.embed.collection import (
    EmbeddingCollection as EmbeddingCollection,
    EmbeddingState as EmbeddingState,
)
from shardjax.embed.exchange import (
    Sequence as Sequence,
    sequence_masks as sequence_masks,
    split_features as split_features,
)
from shardjax.embed.index import Index as Index
from shardjax.embed.jagged import Jagged as Jagged, as_keys as as_keys
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
from shardjax.embed.table_rows import TableRows as TableRows
