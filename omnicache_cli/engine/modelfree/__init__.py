"""vLLM's own scheduler, block pool and hasher, with no model behind them."""
