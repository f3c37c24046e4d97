"""Train recommender-scale models in JAX.

This module is the table of contents: what it lists is the public interface.
"""

from shardjax import (
    checkpoint as checkpoint,
    data as data,
    embed as embed,
    export as export,
    metrics as metrics,
    models as models,
    processes as processes,
    profiling as profiling,
    rl as rl,
    train as train,
    writers as writers,
    zero as zero,
)
from shardjax.mesh import (
    DATA_AXIS as DATA_AXIS,
    MODEL_AXIS as MODEL_AXIS,
    MeshShape as MeshShape,
    ensure_devices as ensure_devices,
    make_mesh as make_mesh,
    simulate_cpu_devices as simulate_cpu_devices,
)
from shardjax.model_step import (
    ModelState as ModelState,
    init_model_state as init_model_state,
    make_model_eval as make_model_eval,
    make_model_step as make_model_step,
)
from shardjax.network import (
    Network as Network,
    as_network as as_network,
    flax_rules as flax_rules,
    from_linen as from_linen,
    from_nnx as from_nnx,
)
from shardjax.partition import (
    check_specs as check_specs,
    match_specs as match_specs,
    named_shardings as named_shardings,
)
from shardjax.precision import (
    LossScaling as LossScaling,
    Precision as Precision,
    with_master as with_master,
)
from shardjax.remat import scan_layers as scan_layers
from shardjax.sharded import gather as gather
from shardjax.state import (
    TrainState as TrainState,
    compute_metrics as compute_metrics,
    init_state as init_state,
    plan_network as plan_network,
    stack_metrics as stack_metrics,
)
from shardjax.train import (
    evaluate as evaluate,
    fit as fit,
    make_eval_step as make_eval_step,
    make_train_step as make_train_step,
    prepare as prepare,
    prepare_stream as prepare_stream,
)

__version__ = "0.1.0"
