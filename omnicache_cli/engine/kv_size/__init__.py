"""The exact path of `omnicache kv-size`: vLLM's own loader on the meta device, vLLM's own
accounting. Imported only where vLLM is asked for; speaks plain values to the rooms above.
"""
