"""Entry point of `vllm_omni.platform_plugins`: vLLM-Omni asks every platform whether it is there.

vLLM-Omni brings no platform for a CPU; this is one. It is offered only where vLLM itself picked
the CPU, so that nothing changes on any other machine.
"""

PLATFORM = "omnicache_cli.engine.omni.platform.CpuOmniPlatform"


def cpu_platform() -> str | None:
    """Name of the platform's class; None: vLLM runs on something else."""
    from vllm.platforms import current_platform

    return PLATFORM if current_platform.is_cpu() else None
