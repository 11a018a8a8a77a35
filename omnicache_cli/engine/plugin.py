"""Entry point of `vllm.general_plugins`: vLLM calls `register` in every process it starts.

Standard library only, and nothing happens unless the environment names a run folder: an
untraced vLLM pays the import of this module and one look at the environment.
"""

import os

ENVIRONMENT_VARIABLE = "OMNICACHE_TRACE"
"""JSON object: folder (str), token_ids (bool), salt_key (hex): see `probe.recorder.Settings`."""

PLUGIN_NAME = "omnicache_cli"
"""Our name in the entry-point group, for VLLM_PLUGINS."""


def register() -> None:
    """Install the probe when tracing is asked for. Never raises: that would kill the engine."""
    asked = os.environ.get(ENVIRONMENT_VARIABLE)
    if not asked:
        return
    try:
        from omnicache_cli.engine.probe import install

        install.install(asked)
    except Exception as error:  # an engine without a trace beats no engine
        import sys

        print(f"omnicache: this process is not traced: {error!r}", file=sys.stderr)
