"""The KV cache of a model as vLLM would count it, from its config.json alone.

config -> layers -> pages -> groups -> pool -> requests, one file each; every formula names the
vLLM function that it mirrors. No vLLM and no torch: transformers, where class defaults are needed,
runs in a child (`defaults`). What is not understood is refused by naming the field.
"""

MIRRORED_VLLM = "0.30.0"
"""The vLLM whose accounting this room mirrors."""
