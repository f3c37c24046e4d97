"""Saves or restores tables of every kind, as one process of several or alone."""

import json

import jax
import numpy as np
import optax
from flax import nnx

import shardjax as sj
from shardjax import embed, train
from shardjax.checkpoint import Checkpointer
from shardjax.data import Loader
from shardjax.network import from_nnx
from shardjax.sharded import fetch
from shardjax.state import init_state
from tests.embed.joint_run import BATCH, Clicks, Model, tables

SAVED, MORE = 6, 4


def rows_of(collection, state) -> dict[str, dict[str, str]]:
    """Rows and optimizer state of this process, by table and key, as hex."""
    out: dict[str, dict[str, str]] = {}
    for name in ("user", "item", "small", "alone"):
        own = out.setdefault(name, {})
        for part in collection.export(state.tables, name):
            words = np.concatenate(
                [x.reshape(len(x), -1) for x in (part.rows, *part.row_state)], 1
            )
            own |= {
                str(k): w.tobytes().hex() for k, w in zip(part.keys, words, strict=True)
            }
    return out


def main(mesh_shape: str, folder: str, disk: str, restore: bool) -> None:
    """Prints rows as saved or restored, and losses of the steps after."""
    mesh = sj.make_mesh(mesh_shape)
    storage = embed.Storage(device_rows=640, host_bytes="60KB", disk=disk)
    collection = tables(mesh, storage)
    network = from_nnx(Model(nnx.Rngs(0)))
    tx = optax.adam(1e-3)
    plan = sj.plan_network(network, tx, collection, 1, min_bytes=0)
    state = init_state(network, tx, collection, zero=plan)
    step = train.make_train_step(network, tx, collection, zero=plan)
    loader = Loader(
        Clicks(),
        BATCH,
        shuffle_seed=3,
        stream=train.prepare_stream(collection, train=True),
        window=2,
    )
    found: dict = {"losses": []}
    with Checkpointer(
        folder,
        interval=3,
        keep=None,
        full_every=2,
        collection=collection,
        loader=loader,
    ) as checkpointer:
        if restore:
            restored = checkpointer.restore(state, SAVED)
            state, taken = restored.state, restored.step
            found["rows"] = rows_of(collection, state)
        else:
            taken = 0
            checkpointer.maybe_save(0, state)
        for batch in loader:
            state, info = step(state, batch)
            taken += 1
            if not restore:
                checkpointer.maybe_save(taken, state)
            if taken == SAVED:
                found["params"] = jax.tree.map(
                    lambda x: x.tolist(), jax.tree.leaves(fetch(state.params))
                )
            if taken > SAVED:
                found["losses"].append(float(info["loss"]))
            if taken == SAVED + MORE:
                break
        checkpointer.wait(state)
        found["steps"] = checkpointer.steps()
    collection.close()
    print("FOUND " + json.dumps(found))
