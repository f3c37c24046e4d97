"""Joining the processes of a run."""

import jax

from shardjax.processes import service, watching
from shardjax.processes.meeting import Meeting, parse_address


def start_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 60.0,
    heartbeat: float = 20.0,
) -> None:
    """Joins the processes of a run; each of them calls it, before its first JAX operation.

    With all three arguments, those are taken. With none of them JAX looks for what started
    the process: SLURM (srun), Open MPI (mpirun), a TPU pod on Google Cloud or a
    Kubernetes job; where there is none of them, or it started one process only, nothing
    happens.

    Args:
      coordinator: "HOST:PORT" of process 0, a free port there that the others can reach.
      num_processes: how many processes the run has.
      process_id: the number of this one, from 0 on.
      timeout: seconds within which all processes must have come.
      heartbeat: seconds without a sign of life after which a process counts as dead, at
        least 1; JAX then ends the others: see `watch`.

    Raises:
      ValueError: for some of the three without the others, or values that cannot be; or
        if two processes gave the same number, or another `num_processes`.
      RuntimeError: if JAX already runs, or the processes are joined already.
      TimeoutError: if process 0 is not there, or others are not; it names them.
      OSError: if process 0 cannot use the port.

    Example:
      >>> start_processes("localhost:1234", 1, 0)  # one process: nothing to join
      >>> service.process_count()
      1
    """
    given = {
        "coordinator": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ValueError(
            "`coordinator`, `num_processes` and `process_id` belong together:"
            f" {' and '.join(f'`{name}`' for name in missing)}"
            f" {'is' if len(missing) == 1 else 'are'} missing. Give all three, or none of"
            " them where SLURM, Open MPI, Kubernetes or a TPU pod starts the processes"
        )
    if heartbeat < 1 or timeout < 1:
        raise ValueError(
            "`timeout` and `heartbeat` must be at least 1 second, got"
            f" {timeout:g} and {heartbeat:g}"
        )
    local = None
    if missing:
        coordinator, num_processes, process_id, local = service.find_cluster(timeout)
    if coordinator is None or num_processes is None or process_id is None:
        return
    run = Meeting(*parse_address(coordinator), num_processes, process_id, timeout)
    if run.count == 1:
        return
    if service.is_joined():
        raise RuntimeError(
            f"the {service.process_count()} processes of this run are joined already, this"
            f" one as {service.process_index()}. Call start_processes once"
        )
    if service.jax_runs():
        raise RuntimeError(
            "start_processes must come before the first JAX operation (jax.devices and"
            " jnp.zeros are such), but JAX already runs in this process, with the devices"
            " of this process alone. Call it right after the imports"
        )
    run.meet()
    # Its handler of SIGTERM would let the process live on.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        f"{run.host}:{run.port}",
        run.count,
        run.index,
        local_device_ids=local,
        cluster_detection_method="deactivate",
        initialization_timeout=max(int(timeout), 10),
        heartbeat_timeout_seconds=max(int(heartbeat), 1),
        shutdown_timeout_seconds=30,
    )
    watching.heartbeat = heartbeat
