"""Where the time of an engine goes: py-spy on its processes, as a process of its own.

Samples, and joins nothing: the phases of a step come from the trace that is recorded beside it.
"""
