"""ZeRO: parameters, gradients and optimizer state in parts over the mesh.

`plan_zero` says where everything lies, `explain` prints it, `init_state` makes the state
and `make_step` the training step of any loss.
"""

from shardjax.sharded import gather as gather
from shardjax.zero.disk_file import DiskStateError as DiskStateError, Traffic as Traffic
from shardjax.zero.disk_state import DiskOptimizer as DiskOptimizer
from shardjax.zero.disk_step import make_disk_step as make_disk_step
from shardjax.zero.gradients import Loss as Loss, make_gradients as make_gradients
from shardjax.zero.offload import params_for_evaluation as params_for_evaluation
from shardjax.zero.piecewise import PiecewiseError as PiecewiseError
from shardjax.zero.plan import (
    OFFLOADS as OFFLOADS,
    STAGES as STAGES,
    LeafPlan as LeafPlan,
    ZeroPlan as ZeroPlan,
    plan_zero as plan_zero,
)
from shardjax.zero.report import (
    MemoryEstimate as MemoryEstimate,
    WirePrediction as WirePrediction,
    estimate_memory as estimate_memory,
    explain as explain,
    predict_wire_bytes as predict_wire_bytes,
)
from shardjax.zero.step import (
    ZeroState as ZeroState,
    abstract_state as abstract_state,
    apply_update as apply_update,
    init_state as init_state,
    make_step as make_step,
    place_state as place_state,
    state_shardings as state_shardings,
)
