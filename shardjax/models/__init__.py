"""Models as plain Flax (nnx) modules: click-through models, `GPT` and `QNetwork`.

Each click-through model is called as ``model(dense, embeddings)`` and returns one logit
per example:

* ``dense`` is float32 [batch, n_dense]; `n_dense` may be 0;
* ``embeddings`` maps the name of each feature to its pooled vectors, float32
  [batch, row_dim]. `row_dim` follows from the model: ``Model.row_dim(dim)`` is what to
  give to `TableSpec`. Models with a linear part keep a key's weight in column 0 of its
  row, next to its vector, so that each key is looked up once.

They are examples as much as parts: a model of your own needs the same call and nothing
else of this package.
"""

from shardjax.models.dcn import DCN as DCN
from shardjax.models.deepfm import DeepFM as DeepFM
from shardjax.models.dlrm import DLRM as DLRM
from shardjax.models.gpt import GPT as GPT, next_token_loss as next_token_loss
from shardjax.models.interaction import (
    cross as cross,
    dot_interaction as dot_interaction,
    pairwise_interaction as pairwise_interaction,
)
from shardjax.models.logistic import LogisticRegression as LogisticRegression
from shardjax.models.mlp import MLP as MLP
from shardjax.models.q_network import QNetwork as QNetwork, dueling as dueling
from shardjax.models.wide_deep import WideDeep as WideDeep
