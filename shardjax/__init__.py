"""Train recommender-scale models in JAX.

This module is the table of contents: what it lists is the public interface.
"""

from shardjax import models as models
from shardjax.mesh import (
    DATA_AXIS as DATA_AXIS,
    MODEL_AXIS as MODEL_AXIS,
    MeshShape as MeshShape,
    ensure_devices as ensure_devices,
    make_mesh as make_mesh,
    simulate_cpu_devices as simulate_cpu_devices,
)
from shardjax.partition import (
    check_specs as check_specs,
    match_specs as match_specs,
    named_shardings as named_shardings,
)

__version__ = "0.1.0"
