"""A save that nobody has waited for is lost with a word."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import sys
import numpy as np, optax
from flax import nnx
import shardjax as sj
from shardjax.checkpoint import Checkpointer

item = sj.embed.TableSpec("item", dim=2)
features = {"item_id": sj.embed.FeatureSpec(item)}
tables = sj.embed.EmbeddingCollection(features, mesh=sj.make_mesh("1x1"))
model = sj.models.LogisticRegression(features=("item_id",), n_dense=0, rngs=nnx.Rngs(0))
state = sj.init_state(sj.from_nnx(model), optax.sgd(0.1), tables)
rows = tables.load_rows(state.tables, "item", np.arange(200_000), np.ones((200_000, 2)))
checkpointer = Checkpointer(sys.argv[1], collection=tables)
checkpointer.save(7, state.replace(tables=rows))
if sys.argv[2] == "close":
    checkpointer.close()
"""


@pytest.mark.parametrize("end", ["close", "go"])
def test_a_save_that_is_not_waited_for_is_named(tmp_path, end):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "runs"), end]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    words = "the save of step 7 in "
    assert (words in ran.stderr) == (end == "go"), ran.stderr
