"""The doctor with vLLM and vLLM-Omni really imported."""

import json
import subprocess
import sys
from pathlib import Path


def test_deep_imports_both_engines_and_says_for_which_device(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    command = [sys.executable, "-m", "omnicache_cli.cli", "doctor", "--deep", "-q", "-o", path]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (ran.returncode, ran.stderr) == (0, "")
    result = json.loads(path.read_text(encoding="ascii"))
    packages = result["facts"]["packages"]
    assert packages["vllm"]["probe"]["outcome"] == "imports"
    assert packages["vllm"]["probe"]["details"] == {"device": "cpu"}
    assert packages["vllm_omni"]["probe"]["outcome"] == "imports"
