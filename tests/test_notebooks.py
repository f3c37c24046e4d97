"""Notebooks run in a clean kernel, without a word on stderr, and are stored without outputs."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 180  # that a cell may take
INSTALL = """\
try:
    import shardjax as sj
except ImportError:
    %pip install -q "shardjax[experiments]"
"""


# --- what is asked of a notebook ------------------------------------------------------


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def read(path):
    """Reads a notebook; refuses one that is not stored as all are."""
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    form = notebook.nbformat, notebook.nbformat_minor
    assert form == (4, 5), f"{path.name} is of format {form}, not 4.5"
    assert notebook.metadata.kernelspec.name == "python3"
    first, code = notebook.cells[0], code_cells(notebook)
    titled = first.cell_type == "markdown" and first.source.startswith("# ")
    assert titled, f"{path.name} does not begin with its title"
    for cell in code:
        assert not cell.outputs, f"cell {cell.id} of {path.name} is stored with outputs"
        assert cell.execution_count is None, f"cell {cell.id} is stored as executed"
    install, rest = code[0].source, "".join(cell.source for cell in code[1:])
    # which extras it names, and what it imports, is a matter of each notebook
    begin = "try:\n    import shardjax", "%pip install -q", "except ImportError:"
    assert install.startswith(begin[0]), f"{path.name} does not begin to install"
    assert all(part in install for part in begin), f"{path.name} does not install"
    assert "%pip" not in rest, f"{path.name} installs in a second place"
    return notebook


# In a process of its own: a client leaves threads behind, and how its libraries use each
# other is not what pytest shall make errors of.
EXECUTE = """
import sys
import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

path, work, connection, seconds = sys.argv[1:]
manager = KernelManager(connection_file=connection)
# this interpreter, not that of another kernel which has the name
argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
manager.kernel_spec.argv = argv
notebook = nbformat.read(path, nbformat.NO_CONVERT)
where = {"metadata": {"path": work}}
client = NotebookClient(notebook, km=manager, timeout=int(seconds), resources=where)
client.execute()
nbformat.write(notebook, path)
"""


def execute(notebook, folder):
    """Runs all cells in a new kernel, in a new folder; gives the notebook with outputs.

    Raises:
      AssertionError: if a cell fails, or takes longer than `SECONDS`.
    """
    path, work = folder / "executed.ipynb", folder / "work"
    work.mkdir()
    nbformat.write(notebook, path)
    arguments = [path, work, folder / "kernel.json", SECONDS]
    environment = {
        **os.environ,
        "IPYTHONDIR": str(folder / "ipython"),  # not the settings of who runs this
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        # programs run a few times: as in conftest.py
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", EXECUTE, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return nbformat.read(path, nbformat.NO_CONVERT)


def check_outputs(notebook):
    """Refuses a warning, or anything else on stderr, and a notebook without a picture."""
    pictures = 0
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "stream":
                assert output.name != "stderr", f"cell {cell.id}: {output.text}"
                assert "Warning: " not in output.text, f"cell {cell.id}: {output.text}"
            pictures += "image/png" in output.get("data", {})
    assert pictures, "the notebook draws nothing"


# --- the notebooks --------------------------------------------------------------------


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.timeout(900)  # of a busy machine; cells have their own limit
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    check_outputs(execute(read(path), tmp_path))


# --- what is refused ------------------------------------------------------------------

PICTURE = (
    "from IPython.display import Image\nImage(data=b'\\x89PNG\\r\\n', format='png')"
)


def make(path, *sources, title="# Title"):
    """Writes a notebook of code cells after the title and the one that installs."""
    new = nbformat.v4
    cells = [new.new_markdown_cell(title), new.new_code_cell(INSTALL)]
    cells += [new.new_code_cell(source) for source in sources]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, path)
    return path


@pytest.mark.slow
def test_a_clean_notebook_passes_and_runs_here(tmp_path):
    program = (
        "import os, sys, shardjax\n"
        "print(sys.executable, shardjax.__file__, os.environ['JAX_PLATFORMS'])"
    )
    notebook = execute(read(make(tmp_path / "a.ipynb", program, PICTURE)), tmp_path)
    check_outputs(notebook)
    [printed] = code_cells(notebook)[1].outputs
    python, package, platform = printed.text.split()
    assert python == sys.executable
    assert Path(package).parent == ROOT / "shardjax"
    assert platform == "cpu"
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.slow
def test_an_error_is_refused(tmp_path):
    notebook = read(make(tmp_path / "a.ipynb", "1 / 0"))
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        execute(notebook, tmp_path)


@pytest.mark.slow
def test_a_warning_is_refused(tmp_path):
    program = f"import warnings\nwarnings.warn('old')\n{PICTURE}"
    notebook = execute(read(make(tmp_path / "a.ipynb", program)), tmp_path)
    with pytest.raises(AssertionError, match="UserWarning: old"):
        check_outputs(notebook)


def outputs(*cells):
    """A notebook as if it had been executed with these outputs."""
    notebook = nbformat.v4.new_notebook()
    for each in cells:
        notebook.cells.append(nbformat.v4.new_code_cell(outputs=each))
    return notebook


def test_a_word_on_stderr_and_no_picture_are_refused():
    new = nbformat.v4.new_output
    picture = new("display_data", {"image/png": ""})
    check_outputs(outputs([new("stream", name="stdout", text="fine")], [picture]))
    said = new("stream", name="stderr", text="E0000 from a compiler")
    with pytest.raises(AssertionError, match="E0000 from a compiler"):
        check_outputs(outputs([said], [picture]))
    with pytest.raises(AssertionError, match="draws nothing"):
        check_outputs(outputs([new("stream", name="stdout", text="fine")]))


def test_stored_outputs_are_refused(tmp_path):
    path = make(tmp_path / "a.ipynb", "1")
    notebook = read(path)
    notebook.cells[2].outputs = [nbformat.v4.new_output("stream", text="1")]
    nbformat.write(notebook, path)
    with pytest.raises(AssertionError, match="stored with outputs"):
        read(path)
    notebook.cells[2].outputs = []
    notebook.cells[2].execution_count = 1
    nbformat.write(notebook, path)
    with pytest.raises(AssertionError, match="stored as executed"):
        read(path)


def test_a_notebook_that_does_not_install_or_has_no_title_is_refused(tmp_path):
    path = make(tmp_path / "a.ipynb", "1", title="Once upon a time")
    with pytest.raises(AssertionError, match="does not begin with its title"):
        read(path)
    path = make(tmp_path / "b.ipynb", "1")
    notebook = read(path)
    notebook.cells[1].source = "import shardjax as sj"
    nbformat.write(notebook, path)
    with pytest.raises(AssertionError, match="does not begin to install"):
        read(path)
    path = make(tmp_path / "c.ipynb", "%pip install pandas")
    with pytest.raises(AssertionError, match="installs in a second place"):
        read(path)
