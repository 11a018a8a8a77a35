"""Stages and pipelines of vLLM-Omni, on its own runners."""
