"""A run while it is written: what its files say by now. Reads, and touches no engine.

`tail` reads what was appended, `totals` counts, `screen` draws, `follow` repeats the three.
"""
