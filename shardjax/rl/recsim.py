"""A recommender to learn from: users in sessions, slates of items, and a price of clickbait.

Each step shows a slate of candidates, of which the recommender puts one before the user (the
action). The user clicks or not, is satisfied or not, and may leave. The simulator is made so
that who looks one step ahead does worse than who plans:

* An item has a topic vector, a popularity (Zipf over the items) and a share of *clickbait*,
  larger for popular items. A click is likelier the closer the topic is to what the user has in
  mind, and the more the item is clickbait.
* A user has lasting tastes, and a state of mind that drifts: with each click towards the
  item, and always a little back to the tastes.
* *Satisfaction* rises with items that fit and falls with clickbait that was clicked. It moves
  slowly, and both the chance of a click and that of staying grow with it.

The reward of a step is 1 for a click. The myopic choice is the likeliest click; the better one
gives up some of it for what comes later. Sessions of `horizon` steps are truncated: the user
would have gone on; a user who leaves terminates the session. In both cases the next user
comes at once, Zipf over the users.

Ids are 64 bits wide and scattered, like hashes: nothing is to be read from them, and who cuts
them to 32 bits gets other ones. All arrays are [sessions, ...]; an instance's steps are a
function of its arguments, the seed of `reset` and the actions.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardjax.rl.envs import EnvStep


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """How users behave; log-odds, but for rates per step.

    Attributes:
      click: of a click on an item that does not matter to a user, satisfied by half.
      affinity: more, for the cosine of item and state of mind.
      clickbait: more, for an item that is all clickbait.
      loyalty: more, for a user who is satisfied entirely instead of not at all.
      memory: share of satisfaction that stays after a click.
      leave, annoyance: of leaving, for a satisfied user, and more for one who is not at all.
      drift: how far a click moves the state of mind towards the item.
      homing: how far a step moves it back to the user's tastes.
    """

    click: float = -2.5
    affinity: float = 2.5
    clickbait: float = 4.0
    loyalty: float = 6.0
    memory: float = 0.7
    leave: float = -6.0
    annoyance: float = 5.0
    drift: float = 0.15
    homing: float = 0.05


class RecSim:
    """Sessions of users, side by side; a `shardjax.rl.VectorEnv`.

    Observations are a dict:

    * `user`: uint64 [sessions], the user's id;
    * `history`: uint64 [sessions, history], ids of the items shown in this session, the
      newest first, padded with 0, and `clicked`: bool of the same shape;
    * `history_length`: int32 [sessions], how many of them there are;
    * `candidates`: uint64 [sessions, slate], ids of the items to choose from;
    * `step`: int32 [sessions], steps taken in the session.

    Args:
      num_envs: sessions side by side.
      users, items: how many there are.
      slate: candidates per step, the number of actions.
      history: items that an observation remembers.
      horizon: steps after which a session is truncated.
      topics: width of the vectors of users and items.
      zipf: exponent of the popularity of users and items.
      behaviour: of the users.
      seed: of users and items: two instances with the same are of one world.

    Raises:
      ValueError: for a number that is not positive.

    Example:
      >>> sim = RecSim(4, users=1000, items=1000)
      >>> obs = sim.reset(seed=0)
      >>> obs["candidates"].shape, obs["candidates"].dtype
      ((4, 10), dtype('uint64'))
      >>> step = sim.step(sim.best(weight=1.0))
      >>> step.reward.shape, bool(step.truncated.any())
      ((4,), False)
    """

    def __init__(
        self,
        num_envs: int,
        *,
        users: int = 100_000,
        items: int = 100_000,
        slate: int = 10,
        history: int = 10,
        horizon: int = 20,
        topics: int = 16,
        zipf: float = 1.05,
        behaviour: Behaviour | None = None,
        seed: int = 0,
    ):
        sizes = {
            "num_envs": num_envs,
            "users": users,
            "items": items,
            "slate": slate,
            "history": history,
            "horizon": horizon,
            "topics": topics,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"`{name}` must be positive, got {size}")
        if not zipf >= 0:
            raise ValueError(f"`zipf` must not be negative, got {zipf}")
        self.num_envs, self.num_actions = num_envs, slate
        self.horizon, self.history = horizon, history
        self.behaviour = behaviour or Behaviour()
        rng = np.random.default_rng([seed, 0])
        self._tastes = _units(rng.normal(size=(users, topics)))
        self._topics = _units(rng.normal(size=(items, topics)))
        # rank 0 is the most popular; popular items are the more likely clickbait
        share = np.arange(items) / max(items - 1, 1)
        self._clickbait = rng.beta(1 + 3 * (1 - share), 1 + 3 * share)
        self._user_ids = _scatter(np.arange(users), 1)
        self._item_ids = _scatter(np.arange(items), 2)
        self._user_mass = _zipf_mass(users, zipf)
        self._item_mass = _zipf_mass(items, zipf)
        self.reset(seed=seed)

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        """Begins a session in each.

        Args:
          seed: of who comes and what happens; None to go on with the random numbers.
        """
        if seed is not None:
            self._rng = np.random.default_rng([seed, 1])
        n, width = self.num_envs, self._tastes.shape[1]
        self._user = np.zeros(n, np.int64)
        self._mind = np.zeros((n, width))
        self._satisfaction = np.zeros(n)
        self._steps = np.zeros(n, np.int32)
        self._shown = np.full((n, self.history), -1)
        self._clicked = np.zeros((n, self.history), bool)
        self._begin(np.ones(n, bool))
        self._slate = self._draw_slate()
        return self._observe()

    def step(self, actions: np.ndarray) -> EnvStep:
        """Shows the candidates with these numbers, integers [sessions].

        Raises:
          ValueError: for a number that no candidate has.
        """
        actions = self._checked(actions)
        everyone = np.arange(self.num_envs)
        items = self._slate[everyone, actions]
        b, rng = self.behaviour, self._rng
        fit = np.einsum("nd,nd->n", self._mind, self._topics[items])
        bait = self._clickbait[items]
        clicks = rng.random(self.num_envs) < self._click_chance(fit, bait)
        felt = np.clip(0.5 + 0.5 * fit - 0.75 * (bait - 0.4), 0, 1)
        after = b.memory * self._satisfaction + (1 - b.memory) * felt
        self._satisfaction = np.where(clicks, after, self._satisfaction)
        pull = np.where(clicks, b.drift, 0.0)[:, None]
        mind = self._mind + pull * (self._topics[items] - self._mind)
        self._mind = _units(mind + b.homing * (self._tastes[self._user] - mind))
        self._shown = np.roll(self._shown, 1, axis=1)
        self._clicked = np.roll(self._clicked, 1, axis=1)
        self._shown[:, 0], self._clicked[:, 0] = items, clicks
        self._steps += 1
        chance = _sigmoid(b.leave + b.annoyance * (1 - self._satisfaction))
        terminated = rng.random(self.num_envs) < chance
        truncated = ~terminated & (self._steps >= self.horizon)
        self._slate = self._draw_slate()
        last = self._observe()
        done = terminated | truncated
        self._begin(done)
        return EnvStep(
            obs=self._observe() if done.any() else _copied(last),
            next_obs=last,
            reward=clicks.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            valid=np.ones(self.num_envs, bool),
        )

    def close(self) -> None:
        """Nothing to end."""

    def random(self, rng: np.random.Generator) -> np.ndarray:
        """Actions of who knows nothing."""
        return rng.integers(self.num_actions, size=self.num_envs)

    def popularity(self) -> np.ndarray:
        """Actions that show the most popular candidates."""
        return np.argmin(self._slate, axis=1)  # items are numbered by rank

    def best(self, *, weight: float = 0.0) -> np.ndarray:
        """Actions of who knows users and items as they truly are.

        Args:
          weight: of what a candidate does to satisfaction on average, beside the chance of
            a click: 0 is the myopic best. No policy without the truth should do much better
            than the best weight.
        """
        topics = self._topics[self._slate]
        fit = np.einsum("nd,nsd->ns", self._mind, topics)
        bait = self._clickbait[self._slate]
        chance = self._click_chance(fit, bait, self._satisfaction[:, None])
        felt = np.clip(0.5 + 0.5 * fit - 0.75 * (bait - 0.4), 0, 1)
        change = chance * (felt - self._satisfaction[:, None])
        return np.argmax(chance + weight * change, axis=1)

    def state_dict(self) -> dict[str, Any]:
        """Where the sessions are, copied: arrays, and the state of the random numbers."""
        arrays = {
            name: getattr(self, f"_{name}").copy()
            for name in ("user", "mind", "satisfaction", "steps", "shown", "clicked")
        }
        return {
            **arrays,
            "slate": self._slate.copy(),
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> dict[str, np.ndarray]:
        """Goes back to where the sessions were; returns the observations there."""
        for name, value in state.items():
            if name == "rng":
                self._rng.bit_generator.state = value
            else:
                setattr(self, f"_{name}", np.array(value))
        return self._observe()

    def _click_chance(self, fit, bait, satisfaction=None) -> np.ndarray:
        b = self.behaviour
        satisfaction = self._satisfaction if satisfaction is None else satisfaction
        odds = b.click + b.affinity * fit + b.clickbait * bait
        return _sigmoid(odds + b.loyalty * (satisfaction - 0.5))

    def _begin(self, where: np.ndarray) -> None:
        """New sessions: users by Zipf, in the mood of their tastes, satisfied by half."""
        count = int(where.sum())
        if not count:
            return
        users = _draw(self._user_mass, self._rng.random(count))
        noise = self._rng.normal(size=(count, self._mind.shape[1])) * 0.1
        self._user[where] = users
        self._mind[where] = _units(self._tastes[users] + noise)
        self._satisfaction[where] = 0.5
        self._steps[where] = 0
        self._shown[where], self._clicked[where] = -1, False

    def _draw_slate(self) -> np.ndarray:
        """Candidates, half of them by popularity and half from all items."""
        shape = self.num_envs, self.num_actions
        popular = (self.num_actions + 1) // 2
        items = self._rng.integers(len(self._item_ids), size=shape)
        u = self._rng.random((self.num_envs, popular))
        items[:, :popular] = _draw(self._item_mass, u)
        return self._rng.permuted(items, axis=1)

    def _observe(self) -> dict[str, np.ndarray]:
        there = self._shown >= 0
        return {
            "user": self._user_ids[self._user],
            "history": np.where(there, self._item_ids[self._shown], np.uint64(0)),
            "clicked": self._clicked.copy(),
            "history_length": there.sum(axis=1, dtype=np.int32),
            "candidates": self._item_ids[self._slate],
            "step": self._steps.copy(),
        }

    def _checked(self, actions: np.ndarray) -> np.ndarray:
        actions = np.asarray(actions)
        bad = actions.shape != (self.num_envs,) or actions.dtype.kind not in "iu"
        if bad or (actions < 0).any() or (actions >= self.num_actions).any():
            raise ValueError(
                f"actions must be {self.num_envs} integers in [0, {self.num_actions}), got"
                f" {actions.dtype}{list(actions.shape)} from {actions.min(initial=0)} to"
                f" {actions.max(initial=0)}"
            )
        return actions


def _copied(obs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: x.copy() for name, x in obs.items()}


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _units(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def _zipf_mass(count: int, exponent: float) -> np.ndarray:
    """Cumulative shares of ranks."""
    mass = np.cumsum((1.0 + np.arange(count)) ** -exponent)
    return mass / mass[-1]


def _draw(mass: np.ndarray, u: np.ndarray) -> np.ndarray:
    return np.minimum(np.searchsorted(mass, u, side="right"), len(mass) - 1)


def _scatter(numbers: np.ndarray, kind: int) -> np.ndarray:
    """Distinct uint64 ids for numbers, by the finalizer of splitmix64; none is 0."""
    with np.errstate(over="ignore"):
        z = numbers.astype(np.uint64) + np.uint64((kind << 40) + 1)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
