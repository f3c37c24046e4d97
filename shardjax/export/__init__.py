"""Exports for use outside training.

export_rows     rows of tables for other programs: Arrow files, or arrays of NumPy
export_model    a network as StableHLO with the rows of its tables
load_model      loads that, and scores batches (Model, Bags, Rows: of `serving`)
"""

from shardjax.export.formats import Format as Format
from shardjax.export.model import export_model as export_model
from shardjax.export.rows import Filter as Filter, export_rows as export_rows
from shardjax.export.serving import (
    Bags as Bags,
    CorruptModelError as CorruptModelError,
    Model as Model,
    Rows as Rows,
    load_model as load_model,
)
