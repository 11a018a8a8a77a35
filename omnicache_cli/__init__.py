"""omnicache: see what the prefix cache of vLLM and vLLM-Omni really did.

Kept empty of imports: every vLLM process imports this package for the plugin entry point.
"""

__version__ = "0.1.0"
