"""Train recommender-scale models in JAX."""

from shardjax.mesh import (
    DATA_AXIS as DATA_AXIS,
    MODEL_AXIS as MODEL_AXIS,
    MeshShape as MeshShape,
    ensure_devices as ensure_devices,
    make_mesh as make_mesh,
    simulate_cpu_devices as simulate_cpu_devices,
)

__version__ = "0.1.0"
