"""Items of n steps, made of the steps of several environments as they happen.

An item says all that a learner needs: ``target = r_t + discount_t * value(obs_t)``::

    obs_tm1, a_tm1   an observation and the action taken there
    r_t              r_1 + g r_2 + ... + g**(m-1) r_m, of the m steps from there on
    discount_t       g**m, or 0 if the episode terminated in those steps
    obs_t            the observation m steps later

m is n; near the end of an episode there are less than n steps left, and the last n - 1
observations get items of m = n - 1, ..., 1 steps, whether the episode terminated (nothing
is worth anything afterwards) or was truncated (`obs_t` is then the observation at which it
was cut off, whose value still counts). No item reaches from one episode into the next.
"""

from typing import Any

import jax
import numpy as np

_ENDS = ("terminated", "truncated", "valid")


class NStep:
    """Makes items of n steps.

    Args:
      n: Steps of an item.
      discount: What a reward a step later is worth, from 0 to 1.
      num_envs: Number of environments.

    Example:
      >>> n_step = NStep(n=2, discount=0.5, num_envs=1)
      >>> def step(at, terminated=False):
      ...     obs, following = np.array([at]), np.array([at + 1])
      ...     items = n_step.add(
      ...         obs=obs, action=obs, reward=np.ones(1), next_obs=following,
      ...         terminated=[terminated], truncated=[False],
      ...     )
      ...     return items["obs_tm1"].tolist(), items["r_t"].tolist()
      >>> step(0), step(1), step(2, terminated=True)
      (([], []), ([0], [1.5]), ([1, 2], [1.5, 1.0]))
    """

    def __init__(self, n: int, discount: float, num_envs: int):
        if n < 1 or num_envs < 1:
            raise ValueError(
                f"`n` and `num_envs` must be at least 1, got {n} and {num_envs}."
            )
        if not 0 <= discount <= 1:
            raise ValueError(f"`discount` must be from 0 to 1, got {discount}.")
        self._n, self._discount, self._num_envs = n, discount, num_envs
        self._steps: dict[str, Any] | None = None  # of [num_envs, n, ...], rings
        self._last_obs: Any = None  # [num_envs, ...], after the last step
        self._next = np.zeros(
            num_envs, np.int64
        )  # where in the ring the next step goes
        self._pending = np.zeros(num_envs, np.int64)  # steps without an item

    def add(
        self,
        *,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        valid: Any = None,
    ) -> dict[str, Any]:
        """Adds a step of each environment.

        Args:
          obs: A pytree of arrays [num_envs, ...], before the step.
          action: A pytree of arrays [num_envs, ...].
          reward: [num_envs].
          next_obs: Like `obs`, after the step: where an episode ends the *final*
            observation, not the first of the next one.
          terminated: bool [num_envs], the episode ended by itself.
          truncated: bool [num_envs], it was cut off; where both are true it terminated.
          valid: bool [num_envs], False for what is no step and is left out: the reset
            that takes the place of a step where environments reset "in the next step".

        Returns:
          The items that are complete now, a dict of arrays of their own, [m, ...]:
          `obs_tm1`, `a_tm1`, `r_t`, `discount_t` (float32) and `obs_t`, those of more steps
          first.
        """
        step = {"obs": obs, "action": action, "reward": _reward(reward)}
        step = jax.tree.map(np.asarray, step)
        next_obs = jax.tree.map(np.asarray, next_obs)
        if valid is None:
            valid = np.ones(self._num_envs, np.bool_)
        ends = [np.asarray(x, np.bool_) for x in (terminated, truncated, valid)]
        self._check(step, next_obs, ends)
        terminated, truncated, valid = ends
        if self._steps is None:
            self._steps = jax.tree.map(self._ring, step)
            self._last_obs = jax.tree.map(np.empty_like, next_obs)
        envs = np.flatnonzero(valid)
        at = self._next[envs]
        for ring, x in zip(
            jax.tree.leaves(self._steps), jax.tree.leaves(step), strict=True
        ):
            ring[envs, at] = x[envs]
        for kept, x in zip(
            jax.tree.leaves(self._last_obs), jax.tree.leaves(next_obs), strict=True
        ):
            kept[envs] = x[envs]
        self._next[envs] = (at + 1) % self._n
        self._pending[envs] += 1
        ended = valid & (terminated | truncated)
        return self._complete(ended, terminated)

    def flush(self) -> dict[str, Any]:
        """Ends the episodes of all environments here, as truncated; returns their items.

        For when an actor stops: the steps that have no item yet get theirs.
        """
        if self._steps is None:
            raise RuntimeError("Nothing to flush: `add` a step first.")
        never = np.zeros(self._num_envs, np.bool_)
        return self._complete(~never, never)

    def _complete(self, ended: np.ndarray, terminated: np.ndarray) -> dict[str, Any]:
        """Makes the items there are now, and forgets what is left of ended episodes."""
        parts = []
        for m in range(self._n, 0, -1):
            due = ended & (self._pending >= m)
            if m == self._n:
                due |= self._pending == m
            if m == self._n or due.any():
                parts.append(self._items(np.flatnonzero(due), m, terminated))
        full = self._pending == self._n
        self._pending[full] -= 1
        self._pending[ended] = 0
        if len(parts) == 1:
            return parts[0]
        return jax.tree.map(lambda *x: np.concatenate(x), *parts)

    def _items(
        self, envs: np.ndarray, m: int, terminated: np.ndarray
    ) -> dict[str, Any]:
        """Items of the last `m` steps of some environments."""
        assert self._steps is not None
        rewards = self._steps["reward"]
        total = np.zeros(len(envs), np.float64)
        for back in range(1, m + 1):
            total *= self._discount
            total += rewards[envs, (self._next[envs] - back) % self._n]
        first = (self._next[envs] - m) % self._n
        discount = np.where(terminated[envs], 0.0, self._discount**m)
        return {
            "obs_tm1": jax.tree.map(lambda x: x[envs, first], self._steps["obs"]),
            "a_tm1": jax.tree.map(lambda x: x[envs, first], self._steps["action"]),
            "r_t": total.astype(rewards.dtype),
            "discount_t": discount.astype(np.float32),
            "obs_t": jax.tree.map(lambda x: x[envs], self._last_obs),
        }

    def _ring(self, x: np.ndarray) -> np.ndarray:
        return np.zeros((self._num_envs, self._n, *x.shape[1:]), x.dtype)

    def _check(self, step, next_obs, ends) -> None:
        given = {**step, "next_obs": next_obs, **dict(zip(_ENDS, ends, strict=True))}
        leaves, _ = jax.tree_util.tree_flatten_with_path(given)
        wrong = [
            f"{path[0].key}{jax.tree_util.keystr(path[1:])} {list(x.shape)}"
            for path, x in leaves
            if x.shape[:1] != (self._num_envs,)
            or (path[0].key in ("reward", *_ENDS) and x.ndim > 1)
        ]
        if wrong:
            raise ValueError(
                f"Each array of a step must have the first dimension num_envs,"
                f" {self._num_envs} (and `reward`, `terminated`, `truncated` and `valid` no"
                f" other), got {', '.join(wrong)}."
            )
        if _form(step["obs"]) != _form(next_obs):
            raise ValueError(
                "`next_obs` must have the shapes and dtypes of `obs`,"
                f" {_form(step['obs'])}, got {_form(next_obs)}."
            )
        if self._steps is not None:
            known = jax.tree.map(lambda x: x[:, 0], self._steps)
            if _form(known) != _form(step):
                raise ValueError(
                    "Steps must have the shapes and dtypes of the first one,"
                    f" {_form(known)}, got {_form(step)}."
                )

    def state_dict(self) -> dict[str, Any]:
        """The steps that have no item yet, a pytree of copies of numpy arrays."""
        state = {"next": self._next, "pending": self._pending}
        if self._steps is not None:
            state |= {"steps": self._steps, "last_obs": self._last_obs}
        return jax.tree.map(np.copy, state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken, with the same `n` and `num_envs`."""
        rings = jax.tree.leaves(state.get("steps"))
        wanted = (self._num_envs, self._n)
        if len(state["next"]) != self._num_envs or any(
            x.shape[:2] != wanted for x in rings
        ):
            raise ValueError(
                "The state must be of an NStep with as many environments and steps,"
                f" {list(wanted)}, got {len(state['next'])} environments and arrays of"
                f" steps {[list(x.shape[:2]) for x in rings]}."
            )
        state = jax.tree.map(np.array, dict(state))
        self._next, self._pending = state["next"], state["pending"]
        self._steps, self._last_obs = state.get("steps"), state.get("last_obs")


def _reward(reward: Any) -> np.ndarray:
    """Rewards as floats: their sums are."""
    array = np.asarray(reward)
    if array.dtype.kind in "biu":
        return array.astype(np.float32)
    return array


def _form(tree: Any) -> Any:
    """Shapes and dtypes of a pytree, to compare and to show."""
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
