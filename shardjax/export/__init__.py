"""Exports for use outside training.

export_rows     rows of tables for other programs: Arrow files, or arrays of NumPy
"""

from shardjax.export.formats import Format as Format
from shardjax.export.rows import Filter as Filter, export_rows as export_rows
