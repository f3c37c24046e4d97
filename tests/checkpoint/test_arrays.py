"""Trees of arrays come back as they were, on other devices too, or one error says why."""

import json
import logging
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

import shardjax as sj
from shardjax import zero
from shardjax.checkpoint import arrays
from shardjax.checkpoint.arrays import ArrayWriter, describe, flatten, restore
from tests.helpers import run_python
from tests.zero.small import plan_small, small_params


@pytest.fixture
def writer():
    with ArrayWriter() as writer:
        yield writer


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step" / "arrays"


def sharded(x, mesh="8x1", *spec, memory=None):
    sharding = jax.NamedSharding(sj.make_mesh(mesh), jax.P(*spec), memory_kind=memory)
    return jax.device_put(x, sharding)


def save(writer, path, tree):
    """Writes a tree; returns what there is to say of it, through JSON as in a manifest."""
    described = describe(tree)
    writer.save(path, tree)
    writer.wait()
    return json.loads(json.dumps(described))


def numbers(x):
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def assert_same(new, old, exact=True):
    """Equal bit for bit, of the same types, in the same places.

    Args:
      exact: also whether JAX may move them.
    """
    assert jax.tree.structure(new) == jax.tree.structure(old)
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    for a, b in pairs:
        assert isinstance(a, jax.Array) or type(a) is type(b)
        if isinstance(b, (jax.Array, jax.ShapeDtypeStruct)):
            assert a.sharding.is_equivalent_to(b.sharding, b.ndim), (a, b)
            assert a.sharding.memory_kind == b.sharding.memory_kind
            assert a.dtype == b.dtype and a.shape == b.shape
        if isinstance(b, jax.Array):
            assert a.committed == b.committed or not exact
        if not isinstance(b, jax.ShapeDtypeStruct):
            a, b = numbers(a), numbers(b)
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert a.tobytes() == b.tobytes()


def buffers(tree):
    """The addresses of all shards of all leaves."""
    found = []
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array):
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                x = jax.random.key_data(x)
            shards = x.addressable_shards
            found += [s.data.unsafe_buffer_pointer() for s in shards if s.data.nbytes]
        elif isinstance(x, np.ndarray) and x.nbytes:
            found.append(x.ctypes.data)
    return found


def abstract(tree):
    def leaf(x):
        if not isinstance(x, jax.Array):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    return jax.tree.map(leaf, tree)


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclass
class Record:
    values: Any
    count: Any


def every_kind():
    random = np.random.default_rng(0)
    normal = random.normal(size=(16, 8)).astype(np.float32)
    return {
        "split": sharded(normal, "4x2", "data", "model"),
        "replicated": sharded(normal, "8x1"),
        "pinned": sharded(normal, "8x1", "data", memory="pinned_host"),
        "unpinned": sharded(normal, "1x1", memory="unpinned_host"),
        "one_device": jnp.asarray(normal + 1),
        "scalar": sharded(np.int32(7)),
        "bool": jnp.array([True, False]),
        "bf16": sharded(normal.astype(ml_dtypes.bfloat16), "8x1", "data"),
        "f16": jnp.asarray(normal, jnp.float16),
        "f8": jnp.asarray(normal, jnp.float8_e4m3fn),
        "f8_5": jnp.asarray(normal, jnp.float8_e5m2),
        "int4": jnp.arange(-8, 8, dtype=jnp.int4),
        "complex": jnp.array([1 + 2j], jnp.complex64),
        "key": sharded(jax.random.key(3)),
        "keys": sharded(jax.random.split(jax.random.key(4), 8), "8x1", "data"),
        "pinned_key": sharded(jax.random.key(5), memory="pinned_host"),
        "rbg": jax.random.key(6, impl="rbg"),
        "empty": sharded(np.zeros((0, 8), np.float32), "8x1", None, "data"),
        "empty_keys": jax.random.split(jax.random.key(0), 0),
        "none": None,
        "numpy": {
            "f64": random.normal(size=(3, 1, 2)),
            "fortran": np.asfortranarray(random.normal(size=(3, 5))),
            "strided": np.arange(20)[::3],
            "bf16": np.ones(3, ml_dtypes.bfloat16),
            "zero_dim": np.array(5, np.uint64),
            "empty": np.zeros((2, 0), np.int16),
            "scalar": np.float32(0.1),
            "bool": np.bool_(True),
        },
        "python": [True, 2**40, -1, 0.1, float("-inf"), 1j],
        "pair": Pair(jnp.arange(3), (np.arange(2), None)),
        "record": Record(jnp.ones(2), 3),
        "a.b": {"c": np.arange(1)},
        "a": {"b.c": np.arange(2), "b c/%2E#?é": np.arange(3)},
    }


@pytest.mark.parametrize("shapes_alone", [False, True])
def test_every_kind_of_leaf_comes_back(writer, path, shapes_alone):
    tree = every_kind()
    described = save(writer, path, tree)
    result = restore(path, described, abstract(tree) if shapes_alone else tree)
    assert_same(result, tree, exact=not shapes_alone)
    assert len(set(buffers(result))) == len(buffers(result))
    assert not set(buffers(result)) & set(buffers(tree))
    result["numpy"]["f64"][:] = 0  # can be written to


def test_a_folder_with_an_odd_name(writer, tmp_path):
    path = tmp_path / "run #1 %20?é" / "a b"
    described = save(writer, path, {"w": jnp.arange(3)})
    assert_same(restore(path, described, {"w": jnp.zeros(3, int)})["w"], jnp.arange(3))


@pytest.mark.parametrize("tree", [jnp.arange(5), np.zeros((0,)), {"": {"": 1}}, [], 3])
def test_odd_trees(writer, path, tree):
    described = save(writer, path, tree)
    assert path.is_dir()
    assert_same(restore(path, described, tree), tree)


def test_kinds_of_the_same_dtype_change_into_each_other(writer, path):
    described = save(writer, path, {"a": np.arange(8.0), "b": 2.5, "c": jnp.arange(8)})
    target = {
        "a": np.float64(0),
        "b": np.zeros((), np.float64),
        "c": np.zeros(8, np.int32),
    }
    target["a"] = np.zeros(8)
    result = restore(path, described, target)
    assert_same(
        result, {"a": np.arange(8.0), "b": np.array(2.5), "c": np.arange(8, dtype="i4")}
    )
    described = save(writer, path.with_name("x"), {"c": np.arange(8, dtype=np.int32)})
    target = {"c": sharded(np.zeros(8, np.int32), "8x1", "data")}
    result = restore(path.with_name("x"), described, target)
    assert_same(result, {"c": sharded(np.arange(8, dtype=np.int32), "8x1", "data")})


def test_describe():
    mesh = sj.make_mesh("4x2")
    spec = jax.P(("data", "model"), None)
    sharding = jax.NamedSharding(mesh, spec, memory_kind="pinned_host")
    tree = {
        "w": jax.device_put(np.zeros((8, 2), np.float32), sharding),
        "key": jax.random.key(0),
        "n": 3,
        "s": np.float32(1),
    }
    described = describe(tree)
    assert json.loads(json.dumps(described)) == described
    assert described["w"] == {
        "kind": "jax",
        "shape": [8, 2],
        "dtype": "float32",
        "spec": [["data", "model"], None],
        "memory": "pinned_host",
    }
    assert described["key"]["dtype"] == "key<fry>" and described["key"]["spec"] is None
    assert described["n"]["kind"] == "int" and described["n"]["dtype"] == "int64"
    assert described["s"]["kind"] == "numpy_scalar"


def test_paths():
    tree = Record([Pair(1, {"k": 2}), None], jnp.ones(1))
    assert list(flatten(tree)) == ["values/0/first", "values/0/second/k", "count"]
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert set(flatten(nnx.state(model))) == {"bias/value", "kernel/value"} or set(
        flatten(nnx.state(model))
    ) == {"bias", "kernel"}


def test_nnx_state_comes_back(writer, path):
    state = nnx.state(nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    described = save(writer, path, state)
    target = jax.tree.map(lambda x: x + 1, state)
    result = restore(path, described, target)
    assert isinstance(result, nnx.State)
    assert_same(result, state)


def test_meshes_with_explicit_axes_in_a_context_of_theirs(writer, path):
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}
    with jax.set_mesh(mesh):
        state = {"w": jnp.zeros((8, 6), out_sharding=jax.P("data", "model")) + 3}
        described = save(writer, path, state)
        again = restore(path, described, state)
    assert_same(again, state)
    assert again["w"].sharding.mesh.axis_types == mesh.axis_types
    assert_same(restore(path, described, state), state)  # outside as well


def test_what_is_no_leaf_is_refused(writer, path):
    def message(tree, kind=TypeError):
        with pytest.raises(kind) as error:
            writer.save(path, tree)
        assert not path.exists()
        return str(error.value)

    assert message({"a": {"b": "text"}}) == (
        "a/b must be a jax.Array, a numpy array or number, or a bool, int, float or"
        " complex, got builtins.str. Make it an array, or keep it out of the state"
    )
    assert "the tree must be a jax.Array" in message(object())
    assert "numpy.ma.MaskedArray" in message(np.ma.zeros(2)).replace(
        "numpy.ma.core", "numpy.ma"
    )
    assert "w must be an array or a number to be saved, got its shape alone" in message(
        {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}
    )
    assert "got <U1. Store it as one of numpy's or JAX's numbers" in message(
        {"w": np.array(["a"])}
    )
    assert "got object" in message({"w": np.array([None])})
    assert "in the byte order of the machine" in message({"w": np.zeros(1, ">f4")})
    assert "got float8_e4m3. Store it as float8_e4m3fn" in message(
        {"w": np.zeros(1, ml_dtypes.float8_e4m3)}
    )
    assert "got uint4. Store it as uint8" in message({"w": jnp.zeros(1, jnp.uint4)})
    assert message({"n": 2**63}, ValueError) == (
        "n must fit into 64 bits, got 9223372036854775808. Keep it in two parts"
    )
    assert message({"a": {"b": 1}, "a/b": 2}, ValueError) == (
        "every leaf must have a path of its own, got two with 'a/b'. Rename one: a key"
        " with a / reads like two keys"
    )
    gone = jnp.ones(2)
    gone.delete()
    assert message({"w": gone}, ValueError) == (
        "w must hold its values, got an array that was donated to a step or deleted. Save"
        " the state that the step returned"
    )


def test_arrays_of_one_process_are_refused_where_there_are_several(
    writer, path, monkeypatch
):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        ValueError, match="w must be on the devices of all processes, got"
    ):
        writer.save(path, {"w": jnp.ones(2)})


def test_a_path_that_exists_is_refused(writer, path):
    path.mkdir(parents=True)
    with pytest.raises(
        FileExistsError, match="into a new folder, but there is something"
    ):
        writer.save(path, {"w": jnp.ones(2)})


def test_a_timeout_must_be_positive():
    with pytest.raises(ValueError, match="`timeout` must be positive seconds, got 0"):
        ArrayWriter(timeout=0)


# Restoring onto other devices


@pytest.mark.parametrize("stage", [0, 3])
def test_zero_state_on_other_meshes_and_stages(writer, path, stage):
    tx = optax.adam(1e-2)
    saved = plan_small("8x1", stage, tx, offload="all" if stage == 3 else "none")
    state = zero.init_state(small_params(), tx, saved)
    step = zero.make_step(_quadratic, tx, saved)
    batch = {"x": np.ones(8, np.float32)}
    state, _ = step(state, batch)
    described = save(writer, path, state)
    whole = jax.tree.map(np.asarray, state)
    others = [("1x1", 0), ("4x2", 3), ("2x4", 1), ("3x1", 2), ("8x1", 3 - stage)]
    for mesh, other in others:
        offload = {"4x2": "all", "2x4": "opt_state"}.get(mesh, "none")
        plan = plan_small(mesh, other, tx, offload=offload)
        target = zero.abstract_state(plan)
        result = restore(path, described, target)
        assert_same(result, target)
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(whole), strict=True):
            assert np.asarray(a).tobytes() == b.tobytes()
        assert len(set(buffers(result))) == len(buffers(result))


def _quadratic(params, batch):
    total = sum(
        jnp.sum(zero.gather(x) ** 2)
        for x in jax.tree.leaves(params)
        if jnp.issubdtype(zero.gather(x).dtype, jnp.floating)
    )
    return total * jnp.sum(batch["x"]), jnp.sum(batch["x"])


OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
    "masked": optax.masked(optax.adam(1e-3), {"a": True, "b": False}),
    "multi": optax.multi_transform(
        {"x": optax.adam(1e-3), "y": optax.sgd(0.1, momentum=0.9)}, {"a": "x", "b": "y"}
    ),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "inject": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "multi_steps": optax.MultiSteps(optax.adam(1e-3), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optax_states_keep_their_types(writer, path, name):
    tx = OPTIMIZERS[name]
    params = {
        "a": sharded(np.ones((8, 8), np.float32), "8x1", "data"),
        "b": jnp.ones(3),
    }
    grads = jax.tree.map(lambda p: p * 0.5, params)
    fresh = tx.init(params)
    _, state = tx.update(grads, fresh, params)
    described = save(writer, path, state)
    result = restore(path, described, fresh)
    assert jax.tree.structure(result) == jax.tree.structure(state)
    assert_same(abstract(result), abstract(fresh))
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(state), strict=True):
        assert numbers(a).tobytes() == numbers(b).tobytes()
    one, _ = tx.update(grads, result, params)
    other, _ = tx.update(grads, state, params)
    assert all(np.array_equal(one[k], other[k]) for k in params)


def test_large_arrays_in_chunks_and_batches(writer, path, monkeypatch):
    monkeypatch.setattr(arrays, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(arrays, "_BATCH_BYTES", 3000)
    random = np.random.default_rng(0)
    tree = {
        f"w{i}": random.normal(size=(24 * i, 17)).astype(np.float32) for i in range(6)
    }
    described = save(
        writer, path, {k: sharded(x, "8x1", "data") for k, x in tree.items()}
    )
    target = {k: sharded(0 * x, "3x1", "data") for k, x in tree.items()}
    result = restore(path, described, target)
    assert_same(result, {k: sharded(x, "3x1", "data") for k, x in tree.items()})


def test_a_restored_state_can_be_donated(writer, path):
    shape = jnp.zeros((64, 64))
    tree = {"a": sharded(shape + 1), "b": sharded(shape + 1)}
    tree["c"] = sharded(jax.random.key(0))
    described = save(writer, path, tree)
    state = restore(path, described, abstract(tree))
    before = buffers(state["a"])

    def double(state):
        return {"a": state["a"] * 2, "b": state["b"] * 3, "c": state["c"]}

    step = jax.jit(double, donate_argnums=0)
    state = step(state)
    assert buffers(state["a"]) == before  # reused, so they are its own
    assert float(state["a"].sum()) == 2 * 64 * 64


# Writing in the background


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_donation_after_save_changes_nothing_stored(writer, path, memory):
    values = np.arange(8 << 14, dtype=np.float32).reshape(8, -1)
    state = {
        "w": sharded(values, "8x1", "data", memory=memory),
        "key": jax.device_put(
            jax.random.key(1), jax.NamedSharding(sj.make_mesh("8x1"), jax.P())
        ),
    }
    sharding = {"w": state["w"].sharding, "key": state["key"].sharding}

    def add(state):
        w = jax.device_put(state["w"], jax.memory.Space.Device) + 1
        return {"w": w, "key": state["key"]}

    step = jax.jit(add, donate_argnums=0, out_shardings=sharding)
    target, described = abstract(state), describe(state)
    jax.block_until_ready(step(jax.tree.map(jnp.copy, state)))  # compiled
    writer.save(path, state)
    for _ in range(10):
        state = step(state)
    writer.wait()
    assert np.asarray(state["w"])[0, 0] == 10
    assert np.array_equal(restore(path, described, target)["w"], values)


def test_changes_in_place_after_save_change_nothing_stored(writer, path):
    tree = {"big": np.arange(1 << 20), "small": np.ones(3), "empty": np.zeros(0)}
    described = describe(tree)
    writer.save(path, tree)
    for x in tree.values():
        x[:] = -1
    writer.wait()
    result = restore(path, described, tree)
    assert np.array_equal(result["big"], np.arange(1 << 20))
    assert np.array_equal(result["small"], np.ones(3))


def test_files_stay_as_they_are_after_wait(writer, path):
    described = save(writer, path, every_kind())

    def contents():
        return {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}

    before = contents()
    assert 0 < len(before) < 40  # however many arrays
    assert [p.name for p in path.parent.iterdir()] == ["arrays"]
    restore(path, described, every_kind())
    save(writer, path.with_name("other"), {"w": np.ones(3)})
    assert contents() == before


def test_a_renamed_folder_is_read(writer, path):
    described = save(writer, path, {"w": jnp.arange(3)})
    path.parent.rename(path.parent.with_name("committed"))
    path = path.parent.with_name("committed") / "arrays"
    assert_same(restore(path, described, {"w": jnp.zeros(3, int)})["w"], jnp.arange(3))


@pytest.fixture
def no_room():
    """Files of this process can have no more than 64 KB, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("at", ["wait", "save", "close"])
def test_a_failed_write_raises_once_and_the_writer_goes_on(writer, path, no_room, at):
    tree = {"w": np.ones(1 << 20)}
    writer.save(path, tree)
    calls = {
        "wait": writer.wait,
        "save": lambda: writer.save(path.with_name("next"), tree),
        "close": writer.close,
    }
    with pytest.raises(
        OSError, match="must be written in full, but that failed"
    ) as error:
        calls[at]()
    assert str(path) in str(error.value) and "File too large" in str(error.value)
    assert not path.exists() and not path.with_name("next").exists()
    no_room()
    writer.wait()  # only once
    described = save(writer, path.with_name("next"), tree)
    assert_same(restore(path.with_name("next"), described, tree), tree)


def test_a_folder_that_cannot_be_made(writer, tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "arrays"

    def run():
        writer.save(path, {"w": jnp.ones(2)})
        writer.wait()

    with pytest.raises(OSError, match="See that there is room"):
        run()
    save(writer, tmp_path / "other", {"w": jnp.ones(2)})


def test_saves_wait_for_each_other(writer, path):
    trees = [{"w": np.full(1 << 18, i)} for i in range(4)]
    for i, tree in enumerate(trees):
        writer.save(path / str(i), tree)
        assert i == 0 or (path / str(i - 1)).exists()
    writer.wait()
    for i, tree in enumerate(trees):
        assert_same(restore(path / str(i), describe(tree), tree), tree)


def test_nothing_is_logged_and_the_users_log_is_left_alone(writer, path, caplog, capfd):
    root = logging.getLogger()
    before = (list(root.handlers), root.level, list(logging.getLogger("absl").filters))
    caplog.set_level(logging.DEBUG, "absl")
    described = save(writer, path, {"w": jnp.ones(2), "n": 3})
    restore(path, described, {"w": jnp.ones(2), "n": 3})
    writer.close()
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
    logging.getLogger("absl").warning("the user's own")
    assert [r.message for r in caplog.records] == ["the user's own"]
    filters = list(logging.getLogger("absl").filters)
    assert (list(root.handlers), root.level) == before[:2] and filters == before[2]


def test_importing_shardjax_imports_no_orbax():
    run_python(
        "import sys, shardjax, shardjax.checkpoint.arrays\n"
        "assert not {'orbax', 'tensorstore'} & set(sys.modules)"
    )


# What does not fit


def test_all_that_does_not_fit_is_listed(writer, path):
    tree = {
        "params": {"w": jnp.ones((4, 2)), "b": jnp.ones(2), "gone": jnp.ones(1)},
        "opt_state": [3, jax.random.key(0)],
    }
    described = save(writer, path, tree)
    target = {
        "params": {
            "w": jnp.ones((4, 3)),
            "b": jnp.ones(2, jnp.bfloat16),
            "new": np.ones(5),
        },
        "opt_state": [3.0, jax.random.key(0, impl="rbg")],
    }
    with pytest.raises(ValueError, match="they differ") as error:
        restore(path, described, target)
    lines = [
        f"the target must have the leaves of the checkpoint {path}, but they differ:",
        "  - opt_state/0: another dtype, int64[] (int) in the checkpoint, float64[] (float)"
        " in the target",
        "  - opt_state/1: another dtype, key<fry>[] in the checkpoint, key<rbg>[] in the"
        " target",
        "  - params/b: another dtype, float32[2] in the checkpoint, bfloat16[2] in the"
        " target",
        "  - params/new: float64[5] in the target, not in the checkpoint",
        "  - params/w: another shape, float32[4, 2] in the checkpoint, float32[4, 3] in the"
        " target",
        "  - params/gone: float32[1] in the checkpoint, not in the target",
        "Restore into the state that was saved, or leave leaves as the target has them with"
        " ignore=['params/*'], or change dtypes with cast=True (cast=True only makes floats"
        " of floats and integers of integers)",
    ]
    assert str(error.value).splitlines() == lines
    with pytest.raises(ValueError, match="they differ") as error:
        restore(path, described, target, cast=True)
    assert "params/b" not in str(error.value) and "opt_state/0" in str(error.value)


def test_targets_that_cannot_be_filled(writer, path):
    described = save(
        writer, path, {"a": np.ones(2), "b": jnp.ones(2), "c": jnp.ones(2)}
    )
    everywhere = jnp.ones(2).sharding
    target = {
        "a": jax.ShapeDtypeStruct((2,), np.float64, sharding=everywhere),
        "b": jax.ShapeDtypeStruct((2,), jnp.float32),
        "c": jax.ShapeDtypeStruct((2,), jnp.float32, sharding=everywhere),
    }
    with pytest.raises(ValueError, match="in the target") as error:
        restore(path, described, target, ignore=["c"])
    assert str(error.value).splitlines()[1:4] == [
        "  - a: float64 in the target, which JAX makes float32 of."
        ' Set jax.config.update("jax_enable_x64", True)',
        "  - b: the target does not say where it is to lie. Give its ShapeDtypeStruct a"
        " `sharding`",
        "  - c: ignored, so it keeps the target's value, but the target has its shape"
        " alone. Give it as an array",
    ]


def test_ignored_leaves_keep_the_targets_value(writer, path):
    old = {"params": {"w": jnp.ones(2), "gone": 1}, "opt_state": {"mu": jnp.ones(2)}}
    described = save(writer, path, old)
    shared = sharded(jnp.full(2, 5.0))
    target = {
        "params": {"w": jnp.zeros(2), "new": np.arange(3)},
        "opt_state": {"mu": shared, "nu": shared, "n": 4},
    }
    ignore = ["opt_state/*", "*/gone", "params/new"]
    result = restore(path, described, target, ignore=ignore)
    expected = {"params": {"w": jnp.ones(2), "new": np.arange(3)}}
    assert_same(result, expected | {"opt_state": target["opt_state"]})
    assert len(set(buffers(result))) == len(buffers(result))
    assert not set(buffers(result)) & set(buffers(target))


def test_a_target_may_be_donated(writer, path):
    described = save(writer, path, {"w": jnp.arange(3)})
    target = {"w": jnp.zeros(3, int)}
    target["w"].delete()
    assert_same(restore(path, described, target), {"w": jnp.arange(3)})


def test_a_part_of_a_checkpoint(writer, path):
    described = save(
        writer, path, {"params": {"w": jnp.arange(3)}, "params2": 1, "x": 2}
    )
    result = restore(path, described, {"w": jnp.zeros(3, int)}, prefix="params")
    assert_same(result, {"w": jnp.arange(3)})
    assert restore(path, described, 0, prefix="x") == 2
    with pytest.raises(
        ValueError, match=r"params/v: .* in the target, not in the checkp"
    ):
        restore(path, described, {"v": 1}, prefix="params")


def test_cast(writer, path):
    floats = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    tree = {
        "down": sharded(floats, "8x1", "data"),
        "up": sharded(floats.astype(ml_dtypes.bfloat16)),
        "numpy": floats,
        "number": 0.1,
        "wide": np.arange(-8, 8),
        "narrow": jnp.arange(-8, 8, dtype=jnp.int4),
        "unsigned": jnp.arange(3),
        "count": 7,
    }
    described = save(writer, path, tree)
    target = {
        "down": sharded(jnp.zeros((8, 4), jnp.bfloat16), "4x2", "data", "model"),
        "up": sharded(np.zeros((8, 4), np.float32), "8x1", "data"),
        "numpy": np.zeros((8, 4), np.float16),
        "number": sharded(np.float32(0)),
        "wide": sharded(np.zeros(16, np.int8), "8x1", "data"),
        "narrow": np.zeros(16, np.int64),
        "unsigned": sharded(np.zeros(3, np.uint8)),
        "count": np.int16(0),
    }
    result = restore(path, described, target, cast=True)
    assert_same(
        result, abstract(target) | {k: result[k] for k in ("numpy", "narrow", "count")}
    )
    for name, x in result.items():
        assert leaf_type(x) == leaf_type(target[name])
        assert np.array_equal(np.asarray(x), np.asarray(tree[name]).astype(x.dtype)), (
            name
        )


def leaf_type(x):
    return describe(x)[""]


def test_integers_that_do_not_fit_are_not_cast(writer, path):
    described = save(writer, path, {"n": np.array([-1, 300])})
    for x, bounds in (
        (np.zeros(2, np.uint8), "0 to 255"),
        (jnp.zeros(2, jnp.int8), "-128"),
    ):
        with pytest.raises(
            ValueError, match=f"n must fit into u?int8, {bounds}"
        ) as error:
            restore(path, described, {"n": x}, cast=True)
        assert "got values from -1 to 300. Restore it as int64" in str(error.value)


# Damage


def _data_files(path: Path):
    files = [p for p in path.rglob("*") if p.is_file() and p.parent.name == "d"]
    return sorted(files, key=lambda p: p.stat().st_size)


@pytest.mark.parametrize(
    "fault", ["truncated", "removed", "manifest", "metadata", "all"]
)
def test_damage_is_one_error_with_the_folder(writer, path, fault):
    tree = {"params": {"w": jnp.arange(1 << 16)}}
    described = save(writer, path, tree)
    if fault == "truncated":
        file = _data_files(path)[-1]
        file.write_bytes(file.read_bytes()[:1000])
    elif fault == "removed":
        _data_files(path)[-1].unlink()
    elif fault == "manifest":
        (path / "manifest.ocdbt").write_bytes(b"")
    elif fault == "metadata":
        (path / "_METADATA").write_text("{")
    else:
        path.rename(path.with_name("away"))
    with pytest.raises(
        OSError, match="must be as they were written, but cannot be"
    ) as e:
        restore(path, described, tree)
    assert str(path) in str(e.value) and "Restore another checkpoint" in str(e.value)
    if fault in ("truncated", "removed"):
        assert "(params/w)" in str(e.value)


def test_a_described_leaf_that_is_not_there(writer, path):
    described = save(writer, path, {"a": jnp.ones(2)})
    described["b"] = described["a"]
    with pytest.raises(OSError, match=r"\(b\) must be .*: the files do not hold it"):
        restore(path, described, {"a": jnp.ones(2), "b": jnp.ones(2)})


@pytest.mark.slow
def test_many_saves_keep_no_memory(path):
    tree = {f"w{i}": sharded(np.ones((1024, 512), np.float32), "8x1") for i in range(4)}
    tree["n"] = np.ones((1024, 512))
    described, process, sizes = describe(tree), Path("/proc/self/statm"), []
    with ArrayWriter() as writer:
        for i in range(30):
            writer.save(path / str(i), tree)
            writer.wait()
            result = restore(path / str(i), described, tree)
            del result
            sizes.append(
                int(process.read_text().split()[1]) * resource.getpagesize() / 1e6
            )
    # 30 of one that stays would be 2000 MB
    assert sizes[-1] - sizes[9] < 100, sizes
