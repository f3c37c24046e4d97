"""Many processes of one run: how they find each other, and how they tell each other things.

`start_processes` joins them by JAX's own coordination service; from then on
`jax.devices()` has the devices of all. What the host sides of the processes tell each
other goes through that service too, not over the devices: a `Channel` may be used by any
thread at any time, also while the devices are at work. In a program, `watch` sees to it
that no process waits for one that is gone. Everything here works in a run of one process,
which waits for nobody.
"""

from shardjax.processes.agreement import (
    barrier as barrier,
    check_agreement as check_agreement,
)
from shardjax.processes.channel import (
    Channel as Channel,
    ChannelClosed as ChannelClosed,
)
from shardjax.processes.service import (
    process_count as process_count,
    process_index as process_index,
)
from shardjax.processes.start import start_processes as start_processes
from shardjax.processes.watching import LOST as LOST, watch as watch
