"""The examples in the docstrings of every module run and print what they say."""

import doctest
import importlib
import pkgutil

import gymnasium  # noqa: F401  its import sets an environment variable
import pytest

import shardjax

MODULES = ["shardjax"] + [
    module.name for module in pkgutil.walk_packages(shardjax.__path__, "shardjax.")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert result.failed == 0, "the printed examples above went wrong"
