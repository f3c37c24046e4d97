"""What a step costs: flops, bytes on the wire, memory, time."""

from shardjax.profiling.flops import (
    Flops as Flops,
    UnknownFlops as UnknownFlops,
    count_flops as count_flops,
    count_jaxpr_flops as count_jaxpr_flops,
)
from shardjax.profiling.peak import (
    PEAK_FLOPS as PEAK_FLOPS,
    measure_peak_flops as measure_peak_flops,
    mfu as mfu,
    peak_flops as peak_flops,
)
from shardjax.profiling.steps import StepTimer as StepTimer
from shardjax.profiling.trace import TraceWindow as TraceWindow
from shardjax.profiling.usage import Memory as Memory, memory as memory
from shardjax.profiling.wire import (
    Collective as Collective,
    WireBytes as WireBytes,
    collectives as collectives,
    wire_bytes as wire_bytes,
)
