"""vLLM-Omni: its platform for a CPU, its stages under verification, its deploy files."""
