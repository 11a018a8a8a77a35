"""Gathers what `omnicache_cli.doctor` judges: what is installed, what imports, what the machine is.

Whatever has to be imported to be known is imported in `child`, a process of its own that may crash
or hang without harm.
"""
