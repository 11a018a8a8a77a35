"""The command line: one thin file per command. Knows no vLLM; asks `engine` inside functions."""
