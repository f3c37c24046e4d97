"""Deep Q-learning of a recommender: a network over tiered embedding tables.

Users and items have rows in tables that may be larger than the devices, than RAM: where they
lie is for `--storage`. A value is asked for per candidate, so the network scores pairs of a
state (the user, what was shown and clicked in the session) and an item. It does so by a product
of two vectors, which costs little per candidate.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import shardjax as sj
from experiments.dqn_config import Config
from experiments.learners import make_optimizer
from shardjax import embed, rl, train
from shardjax.data import Batch

NOTHING = 0  # no item has this id
FIGURES = 3  # numbers of `_figures`


class SlateNetwork(nnx.Module):
    """Values of items in a session, from vectors; returns `rl.QValues`.

    An item is worth `v + u + b + <w + user + clicked, item>`: v and w are of a network that
    sees the session, u and b the last numbers of the user's and the item's vector (Koren et
    al. 2009), the vectors the rest of them. An item whose row is zero, such as one that was
    never seen, is worth as much as any other such.

    Args:
      dim: of the vectors, at least 2.
      layers: widths of the hidden layers.
      rngs: of the parameters.
    """

    def __init__(self, dim: int, layers: tuple[int, ...], rngs: nnx.Rngs):
        widths = [3 * dim + FIGURES, *layers, dim]
        self.layers = nnx.List(
            nnx.Linear(a, b, rngs=rngs)
            for a, b in zip(widths[:-1], widths[1:], strict=True)
        )

    def __call__(self, dense: jax.Array, embeddings: dict[str, Any]) -> rl.QValues:
        """dense: `_figures` of the session before the action, and after it."""
        candidates = embeddings["candidates"]
        before, after = dense[:, :FIGURES], dense[:, FIGURES : 2 * FIGURES]
        q_tm1 = self._value(embeddings, "", before, embeddings["action"][:, None])
        q_t = self._value(embeddings, "_t", after, candidates.values)
        return rl.QValues(q_tm1[:, 0], jnp.where(candidates.mask, q_t, -jnp.inf))

    def _value(self, embeddings, when: str, figures, items: jax.Array) -> jax.Array:
        """Values [batch, items] of items [batch, items, dim]."""
        user, shown, clicked = (
            embeddings[name] for name in ("user", f"shown{when}", f"clicked{when}")
        )
        x = jnp.concatenate([user, shown, clicked, figures], axis=-1)
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        x = self.layers[-1](x)
        liked = x[:, 1:] + user[:, :-1] + clicked[:, :-1]
        fits = jnp.einsum("bd,bkd->bk", liked, items[..., :-1])
        return (x[:, 0] + user[:, -1])[:, None] + items[..., -1] + fits


class TableLearner:
    """Deep Q-learning in a `rl.RecSim`; a `Learner`.

    Args:
      config: of the program.
      envs: of the recommender.
    """

    def __init__(self, config: Config, envs: rl.RecSim):
        self.mesh = sj.make_mesh(config.mesh)
        self.slate, self.horizon = envs.num_actions, envs.horizon
        rule = config.target_rule()
        self.collection = make_tables(config, self.mesh, self.slate)
        dim = config.recsim.dim
        network = sj.from_nnx(SlateNetwork(dim, config.layers, nnx.Rngs(config.seed)))
        tx = make_optimizer(config)
        plan = sj.plan_network(network, tx, self.collection, config.zero)
        self.kept: Any = ()
        state = sj.init_state(network, tx, self.collection, zero=plan, target=rule)
        self._take(state)
        self._step = sj.make_train_step(
            network,
            tx,
            self.collection,
            zero=plan,
            objective=rl.QLearning(rule, double=config.double),
        )
        self._apply = train.make_apply_step(network, self.collection)
        self.window = config.storage.window
        self.counters: dict[str, float] = {}

    def _take(self, state: sj.TrainState) -> None:
        self.state, self.tables = state.replace(tables=()), state.tables

    @property
    def _whole(self) -> sj.TrainState:
        return self.state.replace(tables=self.tables)

    def q_values(self, obs: dict[str, np.ndarray]) -> np.ndarray:
        """See `Learner`."""
        n = len(obs["user"])
        nothing = np.full(n, NOTHING, np.uint64)
        batch = self._batch(_no_state(n), nothing, obs, np.zeros(n), np.ones(n), None)
        prepared = train.prepare(self.collection, batch, train=False)
        return np.asarray(self._apply(self._whole, prepared).q_t)[:n]

    def publish(self) -> None:
        """See `Learner`: actions are chosen by the tables as they are."""

    def keep(self) -> None:
        """See `Learner`: nothing, tables are not copied."""

    def choose_kept(self) -> None:
        """See `Learner`: the last ones."""

    def learn(self, batch: rl.ReplayBatch) -> tuple[np.ndarray, dict[str, Any]]:
        """See `Learner`."""
        updates, size = batch.ids.shape
        made = [self._items(batch, number) for number in range(updates)]
        losses, errors = [], []
        for start in range(0, updates, self.window):
            part = made[start : start + self.window]
            for prepared in train.prepare_window(self.collection, part):
                state, info = self._step(self._whole, prepared)
                self._take(state)
                train.add_counters(self.counters, prepared.counters)
                losses.append(info["loss"])
                errors.append(info["predictions"])
        found = np.stack([np.asarray(x)[:size] for x in errors])
        return found, {"loss": np.asarray(losses)}

    def facts(self) -> dict[str, Any]:
        """See `Learner`."""
        parameters = sum(x.size for x in jax.tree.leaves(self.state.params))
        return {"parameters": parameters, "rows": self.rows}

    @property
    def rows(self) -> int:
        """How many users and items have a row."""
        return sum(stats["rows"] for stats in self.collection.total_stats())

    def close(self) -> None:
        """Removes the rows on disk."""
        self.collection.close()

    def _items(self, batch: rl.ReplayBatch, number: int) -> Batch:
        """One of the batches of a draw."""
        items = jax.tree.map(lambda x: x[number], batch.items)
        before = items["obs_tm1"]
        everyone = np.arange(len(items["a_tm1"]))
        shown = before["candidates"][everyone, items["a_tm1"]]
        return self._batch(
            before,
            shown,
            items["obs_t"],
            items["r_t"],
            items["discount_t"],
            batch.weights[number],
        )

    def _batch(self, before, action, after, r_t, discount_t, weights) -> Batch:
        """Items as a batch: what the features of `make_tables` say."""
        candidates = after["candidates"]
        lengths = np.full(len(candidates), self.slate, np.int32)
        sessions = (_figures(x, self.horizon) for x in (before, after))
        dense = np.column_stack([*sessions, discount_t]).astype(np.float32)
        return Batch(
            np.asarray(r_t, np.float32),
            dense,
            np.stack([after["user"], action]),
            ("user", "action"),
            {
                **_session(before, ""),
                **_session(after, "_t"),
                "candidates": embed.Jagged(candidates.reshape(-1), lengths),
            },
            weights,
        )


def make_tables(config: Config, mesh, slate: int) -> embed.EmbeddingCollection:
    """Tables of users and items, with a target of each row.

    An item begins as one of which nothing is known. Users begin apart from each other:
    if both were zero, their product would have no gradient.
    """
    tx = rl.keep_target(config.recsim.row_optimizer(), config.target_rule())
    user, item = (
        embed.TableSpec(
            name,
            config.recsim.dim,
            tx,
            initializer=initializer,
            admit=config.admit.policy(),
        )
        for name, initializer in (
            ("user", embed.uniform(0.05)),
            ("item", embed.zeros()),
        )
    )
    bag = embed.FeatureSpec(item, combiner="mean")
    features = {
        "user": embed.FeatureSpec(user),
        "action": embed.FeatureSpec(item, padding_id=NOTHING),
        **dict.fromkeys(("shown", "clicked", "shown_t", "clicked_t"), bag),
        "candidates": embed.FeatureSpec(item, combiner="none", max_length=slate),
    }
    return embed.EmbeddingCollection(
        features,
        mesh=mesh,
        seed=config.seed,
        # each growth compiles the step again
        initial_rows=max(131072 // mesh.size, 1024),
        storage=config.storage.storage(),
    )


def _figures(obs: dict[str, np.ndarray], horizon: int) -> np.ndarray:
    """Numbers that say how a session goes, [sessions, FIGURES]: the share of it that is over,
    that of the remembered items which were clicked, and how much is remembered."""
    length, most = obs["history_length"], max(obs["history"].shape[1], 1)
    clicks = obs["clicked"].sum(axis=1)
    return np.stack(
        [obs["step"] / horizon, clicks / np.maximum(length, 1), length / most], axis=1
    )


def _session(obs: dict[str, np.ndarray], when: str) -> dict[str, embed.Jagged]:
    """Bags of the items that were shown, and of those that were clicked."""
    history = obs["history"]
    there = np.arange(history.shape[1]) < obs["history_length"][:, None]

    def bag(mask):
        return embed.Jagged(history[mask], mask.sum(axis=1, dtype=np.int32))

    return {f"shown{when}": bag(there), f"clicked{when}": bag(there & obs["clicked"])}


def _no_state(n: int) -> dict[str, np.ndarray]:
    """An observation of which nothing is known."""
    return {
        "history": np.zeros((n, 0), np.uint64),
        "history_length": np.zeros(n, np.int32),
        "clicked": np.zeros((n, 0), bool),
        "step": np.zeros(n, np.int32),
    }
