"""What the tests of checkpoints are given."""

import pytest

from shardjax.checkpoint import StepFolder


@pytest.fixture
def folder(tmp_path):
    with StepFolder(tmp_path / "run", write=True) as folder:
        yield folder
