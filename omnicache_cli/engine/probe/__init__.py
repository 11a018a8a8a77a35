"""The instrument inside the engine's processes: wrappers around vLLM's methods that record.

Rules for everything in here: an error is counted and never raised into vLLM; no work that grows
with the length of the run; nothing that waits for a device.
"""
