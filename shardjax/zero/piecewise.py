"""Optimizers that can update their parameters in pieces, and how one is known.

The state of such an optimizer need not be on the devices at once: it is brought there a
piece at a time, some layers of a stack or a whole parameter, updated, and taken away. That
is right exactly when no row of a parameter, along its first dim, depends on another row, on
its place, or on another parameter, as of all optimizers that work element by element;
`split_piecewise` finds out by trial and refuses the others.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from shardjax.zero.opt_state import map_opt_state

_NOT_PIECEWISE = (
    "state that does not stay on the devices is updated a piece at a time, which needs an"
    " optimizer that works element by element, but of this one {reason}. LAMB, Adafactor"
    " and clipping by a norm inside of the optimizer need whole gradients. Use one such as"
    " optax.adamw or optax.sgd, clip by `clip_norm` of the step, which takes the global"
    " norm outside of the optimizer, or keep the state on the devices"
)


class PiecewiseError(ValueError):
    """An optimizer that cannot update its parameters in pieces."""


@dataclass(frozen=True)
class Piecewise:
    """An optax transformation that can be run on pieces of its parameters.

    Below, parameters and the like are lists in the order of the tree; None is what the
    piece has nothing of. What is kept for a parameter is a list too, mostly of one or two
    arrays; what is shared are counts and the like.

    Attributes:
      tx: the transformation.
      params: structure of the parameters that it updates.
      state: structure of its state.
      owners: per leaf of the state, which parameter it is kept for; -1 for shared ones.
      likes: per parameter, its number of dims and its dtype.
      kept_dtypes: per leaf of the state.
    """

    tx: optax.GradientTransformation
    params: Any
    state: Any
    owners: tuple[int, ...]
    likes: tuple[tuple[int, Any], ...]
    kept_dtypes: tuple[Any, ...]

    def split(self, state: PyTree) -> tuple[list[list], list]:
        """What a state keeps for each parameter, and what is shared."""
        kept, shared = [[] for _ in self.likes], []
        leaves = self.state.flatten_up_to(state)
        for owner, x in zip(self.owners, leaves, strict=True):
            (shared if owner < 0 else kept[owner]).append(x)
        return kept, shared

    def join(self, kept: list, shared: list) -> PyTree:
        """The state of these; without elements for parameters of which `kept` is None."""
        parts, rest = [iter(k or ()) for k in kept], iter(shared)
        leaves = []
        for owner, dtype in zip(self.owners, self.kept_dtypes, strict=True):
            if owner < 0:
                leaves.append(next(rest))
            elif kept[owner] is None:
                leaves.append(_nothing(self.likes[owner][0], dtype))
            else:
                leaves.append(next(parts[owner]))
        return self.state.unflatten(leaves)

    def init(self, params: list) -> tuple[list, list]:
        """The state of a piece: what is kept, None where `params` is, and shared."""
        kept, shared = self.split(self.tx.init(self._tree(params)))
        return _where_given(params, kept), shared

    def update(self, grads: list, kept: list, shared: list, params: list):
        """One step of a piece.

        Args:
          grads, kept, params: of the piece, all with None in the same places; any number
            of elements, but as many dims as the parameter has.
          shared: shared state, the same for all pieces of a step.

        Returns:
          The new parameters, and what is kept, None where `params` is, and shared.
        """
        old = self._tree(params)
        state = self.join(kept, shared)
        updates, state = self.tx.update(self._tree(grads), state, old)
        moved: Any = self.params.flatten_up_to(optax.apply_updates(old, updates))
        kept, shared = self.split(state)
        return _where_given(params, moved), _where_given(params, kept), shared

    def _tree(self, values: list) -> PyTree:
        return self.params.unflatten(
            _nothing(*like) if x is None else x
            for x, like in zip(values, self.likes, strict=True)
        )


def _nothing(ndim: int, dtype) -> jax.Array:
    """No elements, in as many dims: masks may ask for those."""
    return jnp.zeros((0,) * ndim, dtype)


def _where_given(params: list, values: list) -> list:
    return [None if p is None else v for p, v in zip(params, values, strict=True)]


def split_piecewise(
    tx: optax.GradientTransformation, abstract_params: PyTree
) -> Piecewise:
    """Checks that an optimizer works in pieces.

    The check runs two steps on small random arrays of as many dims, whole and in pieces,
    and with the gradients of one row NaN, infinite or large: all other rows and all shared
    state must come out the same.

    Args:
      tx: any optax transformation.
      abstract_params: shapes of the parameters that it updates, None for others.

    Raises:
      PiecewiseError: if a row's update depends on more than that row, or cannot be computed
        from (gradients, state, parameters) at all.

    Example:
      >>> shapes = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
      >>> split_piecewise(optax.adam(1e-3), shapes).owners
      (-1, 0, 0)
    """
    leaves, params = jax.tree.flatten(abstract_params)
    abstract = jax.eval_shape(tx.init, abstract_params)
    numbers = params.unflatten(range(len(leaves)))
    owners = tuple(
        jax.tree.leaves(map_opt_state(tx, lambda _, i: i, abstract, numbers, shared=-1))
    )
    kept, state = jax.tree.flatten(abstract)
    for owner, x in zip(owners, kept, strict=True):
        if owner >= 0 and x.shape != leaves[owner].shape:
            _refuse(
                f"a leaf of the state has shape {x.shape}, kept for a parameter of shape"
                f" {leaves[owner].shape}"
            )
    piecewise = Piecewise(
        tx,
        params,
        state,
        owners,
        tuple((x.ndim, x.dtype) for x in leaves),
        tuple(x.dtype for x in kept),
    )
    _try_pieces(piecewise)
    return piecewise


def _refuse(reason: str, cause=None) -> NoReturn:
    raise PiecewiseError(_NOT_PIECEWISE.format(reason=reason)) from cause


def _try_pieces(piecewise: Piecewise) -> None:
    params, grads = _draw(piecewise, 0), [_draw(piecewise, i) for i in (1, 2)]

    @jax.jit
    def run(grads, params):
        kept, shared = piecewise.init(params)
        for g in grads:
            params, kept, shared = piecewise.update(g, kept, shared, params)
        return [params, kept], shared

    def rows(values, start: int, stop: int, first: int = 0, every: int = 1):
        """Rows of every so many parameters from the first on; scalars as they are."""
        chosen = [x if i % every == first else None for i, x in enumerate(values)]
        return jax.tree.map(lambda x: x[start:stop] if x.ndim else x, chosen)

    def attempt(grads, params):
        try:
            return run(grads, params)
        except Exception as e:
            _refuse(f"the update fails on (gradients, state, parameters) ({e})", e)

    whole, shared = attempt(grads, params)
    for first in (0, 1):
        part = (first + 1, first + 2, first, 2)
        moved, shared_too = attempt(
            [rows(g, *part) for g in grads], rows(params, *part)
        )
        expected = [rows(x, *part) for x in _flat(whole)]
        if not _same(expected, _flat(moved)) or not _same(shared, shared_too):
            _refuse("a piece that is updated alone moves in another way")
    for poison in (np.nan, np.inf, 1e4):
        bad = [[_poisoned(x, poison) for x in g] for g in grads]
        moved, shared_too = attempt(bad, params)
        if not _same(*[[rows(x, 1, 3) for x in _flat(y)] for y in (whole, moved)]):
            _refuse(f"a gradient of {poison} in one row changes other rows")
        if not _same(shared, shared_too):
            _refuse(f"a gradient of {poison} in one row changes shared state")


def _draw(piecewise: Piecewise, seed: int) -> list[np.ndarray]:
    """Random numbers for each parameter: three rows, in as many dims."""
    random = np.random.default_rng(seed)
    return [
        np.asarray(random.normal(size=(3, 2, 2, 2, 2, 2, 2, 2)[:ndim])).astype(dtype)
        for ndim, dtype in piecewise.likes
    ]


def _poisoned(x: np.ndarray, poison: float) -> np.ndarray:
    """With another first row, except for scalars."""
    x = x.copy()
    if x.ndim:
        x[0] = poison
    return x


def _flat(moved: list) -> list[list]:
    """Parameters, and each leaf of what is kept for them, as lists over parameters."""
    params, kept = moved
    most = max([len(k) for k in kept if k is not None], default=0)
    return [params] + [
        [None if k is None or i >= len(k) else k[i] for k in kept] for i in range(most)
    ]


def _same(tree: PyTree, other: PyTree) -> bool:
    def same(a, b):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        few = jnp.issubdtype(a.dtype, jnp.floating) and jnp.finfo(a.dtype).bits < 32
        a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
        rtol, atol = (0.02, 1e-2) if few else (1e-4, 1e-6)
        return a.shape == b.shape and np.allclose(a, b, rtol, atol, equal_nan=True)

    return all(
        same(a, b)
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    )
