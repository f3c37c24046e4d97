"""What `import shardjax` gives, and what it must not do."""

import importlib
import inspect
import os
import pkgutil
import re
from importlib import metadata

import pytest

import shardjax
from tests.helpers import run_python

MODULES = [
    module.name for module in pkgutil.walk_packages(shardjax.__path__, "shardjax.")
]


def test_import_touches_no_device_environment_or_flag():
    program = """
import importlib, os, pkgutil, sys
import jax

def flags():
    return {name: getattr(jax.config, name, None) for name in sorted(jax.config.values)}

reads = []
class Environment(type(os.environ)):
    def __getitem__(self, name):
        # What shardjax is built on may read the environment at its own import.
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith("<frozen") or (
            frame.f_code.co_filename == os.__file__
        ):
            frame = frame.f_back
        if frame.f_globals["__name__"].startswith("shardjax"):
            reads.append(name)
        return super().__getitem__(name)

before, environment = flags(), dict(os.environ)
os.environ.__class__ = Environment
import shardjax
for module in pkgutil.walk_packages(shardjax.__path__, "shardjax."):
    importlib.import_module(module.name)
os.environ.__class__ = Environment.__bases__[0]
assert flags() == before, "a flag of JAX changed"
assert dict(os.environ) == environment, "the environment changed"
assert not reads, f"the environment was read: {reads}"
# This fails once any JAX operation has run.
jax.config.update("jax_num_cpu_devices", 5)
assert jax.device_count() == 5
"""
    run_python(program)


@pytest.mark.parametrize("name", MODULES)
def test_modules_hold_no_device_arrays(name):
    import jax

    module = importlib.import_module(name)
    arrays = [k for k, v in vars(module).items() if isinstance(v, jax.Array)]
    assert arrays == []


def test_version_is_the_installed_one():
    assert re.fullmatch(r"\d+\.\d+\.\d+", shardjax.__version__)
    try:
        installed = metadata.version("shardjax")
    except metadata.PackageNotFoundError:
        pytest.skip("shardjax runs from its source folder and is not installed")
    assert installed == shardjax.__version__


def test_package_is_typed():
    assert os.path.exists(os.path.join(os.path.dirname(shardjax.__file__), "py.typed"))


@pytest.mark.parametrize("name", ["shardjax", *MODULES])
def test_every_public_object_is_documented(name):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    bare = [
        f"{name}.{key}"
        for key, value in vars(module).items()
        if not key.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == name
        and not inspect.getdoc(value)
    ]
    assert bare == []
