"""What another pool would do: a workload through vLLM's own scheduler and block pools, no model.

Pure: reads workloads, decides who arrives when and where, counts and reports. The pools are behind
the Protocol `replay.Pool`; the engine room has the real one.
"""
