"""A trained model in a folder: its network as StableHLO, its rows, and what reads them."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from shardjax import embed
from shardjax.embed import EmbeddingCollection, FeatureSpec
from shardjax.export import serving
from shardjax.export.formats import DESCRIPTION
from shardjax.export.rows import Filter, export_rows, versions
from shardjax.folders import check_vacant, whole_folder
from shardjax.network import Network, finish_logits
from shardjax.state import TrainState

PLATFORMS = ("cpu", "cuda", "tpu")


def export_model(
    network: Network,
    collection: EmbeddingCollection,
    state: TrainState,
    directory: str | os.PathLike,
    *,
    n_dense: int,
    predict: Callable[[jax.Array], jax.Array] = jax.nn.sigmoid,
    platforms: Sequence[str] = PLATFORMS,
    filter: Filter | None = None,
    replace: bool = False,
) -> dict[str, int]:
    """Writes a trained model for use where nothing is trained: see `load_model`.

    Its scores are those of an evaluation step, up to the last bits, in which programs that
    are compiled for other sizes of a batch may differ. The folder has

        network.stablehlo   the network, for batches of any size, of `jax.export`
        params.npz          its parameters and other state
        rows/               rows of all tables, as `export_rows` writes them ("npy")
        index/              keys in order, and where their rows are
        model.json          what features, tables and parameters there are
        serving.py          what loads it, a module that needs NumPy and JAX alone

    Besides what `export_rows` takes, in memory are the parameters, and 16 bytes for each
    row of one table.

    Args:
      network: of `shardjax.network`, in the mode in which it does not train.
      collection: the tables.
      state: after the last step; no training meanwhile.
      directory: of the model. It appears whole at the end, or not at all.
      n_dense: dense features of an example.
      predict: logits [batch] to scores, as of `make_eval_step`.
      platforms: that may serve it: "cpu", "cuda", "rocm" or "tpu".
      filter: which rows to write, as of `export_rows`. Keys of others read zeros.
      replace: whether the directory may take the place of one with files.

    Returns:
      How many rows were written, by table.

    Raises:
      FileExistsError: if there is something in the directory already.
      OSError: if it cannot be written.
      ValueError: for a network that does not take batches of any size, or cannot be
        compiled for a platform.
      TypeError, ValueError: for another kind of state, number or filter.

    Example:
      >>> import tempfile, optax, shardjax as sj
      >>> from flax import nnx
      >>> item = sj.embed.TableSpec("item", dim=1, optimizer=optax.sgd(0.1))
      >>> collection = sj.embed.EmbeddingCollection(
      ...     {"item": sj.embed.FeatureSpec(item)}, mesh=sj.make_mesh("1x1")
      ... )
      >>> network = sj.from_nnx(sj.models.LogisticRegression(
      ...     features=("item",), n_dense=3, dim=1, rngs=nnx.Rngs(0)))
      >>> state = sj.init_state(network, optax.sgd(0.1), collection)
      >>> with tempfile.TemporaryDirectory() as above:
      ...     export_model(network, collection, state, f"{above}/model", n_dense=3)
      ...     model = serving.load_model(f"{above}/model")
      ...     model(np.zeros((2, 3)), {"item": np.array([7, 9])})
      {'item': 0}
      array([0.5, 0.5], dtype=float32)
    """
    if isinstance(n_dense, bool) or not isinstance(n_dense, int | np.integer):
        raise TypeError(f"`n_dense` of a model must be an integer, got {n_dense!r}")
    if n_dense < 0:
        raise ValueError(f"`n_dense` of a model must not be negative, got {n_dense}")
    if not isinstance(state, TrainState):
        raise TypeError(
            f"`state` must be the TrainState of the model, got a {type(state).__name__}"
        )
    if isinstance(platforms, str) or not platforms:
        raise TypeError(
            "`platforms` of a model must be a sequence of names such as ('cpu', 'cuda'),"
            f" got {platforms!r}"
        )
    check_vacant(directory, "an export", replace=replace)
    arrays, exported = _export(
        network, collection, state, int(n_dense), predict, tuple(platforms)
    )
    with whole_folder(directory, "an export", replace=replace) as folder:
        (folder / "network.stablehlo").write_bytes(exported.serialize())
        numbered = {str(n): np.asarray(x) for n, (_, x) in enumerate(arrays)}
        np.savez(folder / "params.npz", allow_pickle=False, **numbered)
        step = int(state.step)
        counts = export_rows(
            collection,
            state.tables,
            folder / "rows",
            format="npy",
            filter=filter,
            step=step,
        )
        shutil.copyfile(serving.__file__, folder / "serving.py")
        described = {
            "format": serving.FORMAT,
            "step": step,
            "n_dense": int(n_dense),
            "features": [
                _description(name, spec) for name, spec in collection.features.items()
            ],
            "tables": _index(folder),
            "network": "network.stablehlo",
            "platforms": list(exported.platforms),
            "params": "params.npz",
            "arrays": [name for name, _ in arrays],
            "versions": versions(),
            "files": {
                str(path.relative_to(folder)): [
                    path.stat().st_size,
                    serving.checksum(path),
                ]
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            },
        }
        text = json.dumps(described, indent=2, allow_nan=False)
        (folder / "model.json").write_text(text + "\n")
    return counts


def _export(network, collection, state, n_dense: int, predict, platforms):
    """The arrays of a network by name, and it as StableHLO: a function of these arrays,
    dense features and vectors by feature."""
    whole = {"params": state.params, "model_state": state.model_state}
    paths, tree = jax.tree.flatten_with_path(whole)
    # random keys are constants in it: they are no arrays for a file
    keys = [_as_numpy(x) if _is_key(x) else None for _, x in paths]
    arrays = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), x)
        for (path, x), key in zip(paths, keys, strict=True)
        if key is None
    ]

    def scores(leaves, dense, inputs):
        left = iter(leaves)
        whole = tree.unflatten(
            next(left) if key is None else _as_key(*key) for key in keys
        )
        embeddings = {
            name: embed.Sequence(x["values"], x["mask"]) if isinstance(x, dict) else x
            for name, x in inputs.items()
        }
        logits, _ = network.apply(
            whole["params"], whole["model_state"], dense, embeddings, train=False
        )
        return predict(finish_logits(logits, dense.shape[0]))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in arrays]
    try:
        exported = export.export(jax.jit(scores), platforms=platforms)(
            shapes, *_inputs(collection, n_dense)
        )
    except (jax.errors.InconclusiveDimensionOperation, TypeError) as error:
        if isinstance(error, TypeError) and "_DimExpr" not in str(error):
            raise
        raise ValueError(
            "the network must take batches of any size to be exported, and this one"
            f" needs the number: {str(error).splitlines()[0]} Take sizes from x.shape"
            " in place of len(x), and compare the batch's with nothing"
        ) from error
    except NotImplementedError as error:
        raise ValueError(
            f"the network cannot be compiled for all `platforms` {platforms}: {error}."
            " Name those that serve it"
        ) from error
    return arrays, exported


def _is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _as_numpy(key: jax.Array) -> tuple[np.ndarray, Any]:
    """The bits of random keys, and how they are to be used."""
    return np.asarray(jax.random.key_data(key)), jax.random.key_impl(key)


def _as_key(bits: np.ndarray, impl: Any) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(bits), impl=impl)


def _inputs(collection: EmbeddingCollection, n_dense: int):
    """Shapes of dense features and of vectors by feature, for any batch."""
    features = collection.features
    sizes = export.symbolic_shape(
        ", ".join(["b", *(f"l{n}" for n in range(len(features)))])
    )
    batch, lengths = sizes[0], sizes[1:]
    inputs: dict[str, Any] = {}
    for (name, feature), length in zip(features.items(), lengths, strict=True):
        dim, dtype = feature.table.dim, feature.table.dtype
        if feature.combiner == "none":
            length = feature.max_length or length
            inputs[name] = {
                "values": jax.ShapeDtypeStruct((batch, length, dim), dtype),
                "mask": jax.ShapeDtypeStruct((batch, length), bool),
            }
        else:
            inputs[name] = jax.ShapeDtypeStruct((batch, dim), dtype)
    return jax.ShapeDtypeStruct((batch, n_dense), jnp.float32), inputs


def _description(name: str, feature: FeatureSpec) -> dict[str, Any]:
    """A feature, as `serving` wants it."""
    return {
        "name": name,
        "table": feature.table.name,
        "combiner": feature.combiner,
        "max_length": feature.max_length,
        "on_long": feature.on_long,
        "padding_id": feature.padding_id,
        "on_bad_id": feature.on_bad_id,
        "vocabulary": feature.table.vocabulary,
    }


def _index(folder: Path) -> list[dict[str, Any]]:
    """Writes where the row of each key is; returns the tables, as `serving` wants them."""
    (folder / "index").mkdir()
    found = []
    for table in json.loads((folder / "rows" / DESCRIPTION).read_text())["tables"]:
        files = dict(zip(table["columns"], table["files"], strict=True))
        keys = np.load(folder / "rows" / files["key"], mmap_mode="r")
        order = np.argsort(keys)
        index = f"index/{files['key']}"
        mapped = np.lib.format.open_memmap(
            folder / index, "w+", np.uint64, (2, len(keys))
        )
        np.take(keys, order, out=mapped[0])
        mapped[1] = order
        mapped.flush()
        found.append(
            {
                "name": table["name"],
                "dim": table["dim"],
                "dtype": table["dtype"],
                "vectors": f"rows/{files['vector']}",
                "index": index,
            }
        )
    return found
