"""The versions of vLLM that omnicache was tried with; docs/compatibility.md says how."""

TESTED_VLLM = ("0.30.0",)
"""Releases. A local part (+cpu, +cu129) does not count; a release candidate is another version."""


def is_tested(vllm_version: str) -> bool:
    return vllm_version.partition("+")[0] in TESTED_VLLM
