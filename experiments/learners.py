"""What learns in a kind of environment: a state, the values of actions, an update.

The program of `experiments.dqn` knows no network: it acts, fills a replay and evaluates by a
`Learner`. `VectorLearner` is that of observations which are vectors; that of a recommender is
`experiments.table_learner`.
"""

from typing import Any, Protocol

import jax
import numpy as np
import optax
from flax import nnx

import shardjax as sj
from experiments.dqn_config import Config
from shardjax import embed, rl, zero
from shardjax.models import QNetwork
from shardjax.sharded import fetch, place


class Learner(Protocol):
    """Protocol of what learns.

    Attributes:
      state: a pytree of all that learning changes, to be saved and restored.
      kept: a pytree of what `keep` has kept, likewise.
      tables: the embedding tables that belong to the state, of `collection`; () without.
      collection: None without tables.
      mesh: of its devices.
    """

    state: Any
    kept: Any
    tables: Any
    mesh: jax.sharding.Mesh

    @property
    def collection(self) -> embed.EmbeddingCollection | None: ...

    def q_values(self, obs: Any) -> np.ndarray:
        """Values of the actions in observations [envs, ...], as of the last `publish`:
        float32 [envs, actions]."""
        ...

    def publish(self) -> None:
        """Makes what has been learned that by which actions are chosen."""
        ...

    def keep(self) -> None:
        """Keeps what actions are chosen by now."""
        ...

    def choose_kept(self) -> None:
        """Makes what was kept that by which actions are chosen."""
        ...

    def learn(self, batch: rl.ReplayBatch) -> tuple[np.ndarray, dict[str, Any]]:
        """Takes an update for each of the groups of a batch; returns |TD|, float32
        [groups, items], and figures of each update, [groups]."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the result says of it."""
        ...

    def close(self) -> None:
        """Removes what it has on disk."""
        ...


class VectorLearner:
    """Deep Q-learning on observations that are vectors of floats; a `Learner`.

    Args:
      config: of the program.
      width: of an observation.
      num_actions: how many actions there are.
    """

    collection = None

    def __init__(self, config: Config, width: int, num_actions: int):
        def make() -> QNetwork:
            return QNetwork(
                width,
                num_actions,
                config.layers,
                dueling=config.dueling,
                rngs=nnx.Rngs(config.seed),
            )

        graph, abstract = nnx.split(nnx.eval_shape(make), nnx.Param)

        def q_values(params, obs):
            return nnx.merge(graph, params)(obs)

        self.mesh = sj.make_mesh(config.mesh)
        tx, rule = make_optimizer(config), config.target_rule()
        self.plan = zero.plan_zero(abstract, tx, self.mesh, config.zero)
        self.state = rl.init_dqn(
            lambda: nnx.split(make(), nnx.Param)[1], tx, self.plan, rule
        )
        self._step = rl.make_dqn_step(
            q_values,
            tx,
            self.plan,
            target=rule,
            scan=True,
            double=config.double,
            clip_norm=config.clip or None,
        )
        # items are split over the devices, the updates of a call are not
        self._batch = jax.NamedSharding(self.mesh, jax.P(None, sj.DATA_AXIS))
        self._q_values = jax.jit(q_values)
        self._own = jax.local_devices()[0]
        self.tables: Any = ()
        self.publish()
        self.keep()

    def q_values(self, obs: np.ndarray) -> np.ndarray:
        """See `Learner`."""
        return np.asarray(self._q_values(self._published, obs))

    def publish(self) -> None:
        """See `Learner`: a copy on one device, so that acting is no matter of the mesh."""
        self._published = jax.device_put(fetch(self.state.params), self._own)

    def keep(self) -> None:
        """See `Learner`."""
        self.kept = self._published  # nobody gives it away

    def choose_kept(self) -> None:
        """See `Learner`."""
        self._published = jax.device_put(fetch(self.kept), self._own)

    def learn(self, batch: rl.ReplayBatch) -> tuple[np.ndarray, dict[str, Any]]:
        """See `Learner`."""
        items = place({**batch.items, "weights": batch.weights}, self._batch)
        self.state, info = self._step(self.state, items)
        td = fetch(info.pop("td"))
        return td, {name: np.asarray(info[name]) for name in ("loss", "grad_norm")}

    def facts(self) -> dict[str, Any]:
        """See `Learner`."""
        return {"parameters": sum(int(np.prod(p.shape)) for p in self.plan.leaves)}

    def close(self) -> None:
        """See `Learner`: there is nothing."""


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Adam, at a rate that falls to `lr_final` of itself over the updates of the run."""
    final = config.lr * config.lr_final
    return optax.adam(optax.linear_schedule(config.lr, final, config.total_updates()))
