"""Entry point of `vllm.general_plugins`: vLLM calls `register` in every process it starts.

Standard library only, and nothing happens unless the environment names a run folder: an
untraced vLLM pays the import of this module and one look at the environment.
"""

import os

ENVIRONMENT_VARIABLE = "OMNICACHE_TRACE"
"""JSON object: folder (str), token_ids (bool), salt_key (hex): see `probe.recorder.Settings`."""

PAYLOADS_VARIABLE = "OMNICACHE_PAYLOADS"
"""A folder: what passes between stages of vLLM-Omni is kept there, see `omni.wire`."""

PLUGIN_NAME = "omnicache_cli"
"""Our name in the entry-point group, for VLLM_PLUGINS."""


def register() -> None:
    """Install what the environment asks for. Never raises: that would kill the engine."""
    asked = os.environ.get(ENVIRONMENT_VARIABLE)
    payloads = os.environ.get(PAYLOADS_VARIABLE)
    if not asked and not payloads:
        return
    try:
        if asked:
            from omnicache_cli.engine.probe import install

            install.install(asked)
        if payloads:
            from omnicache_cli.engine.omni import wire

            wire.install(payloads)
    except Exception as error:  # an engine without a trace beats no engine
        import sys

        print(f"omnicache: this process is not traced: {error!r}", file=sys.stderr)
