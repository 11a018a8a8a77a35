"""One run of a whole pipeline in a process of its own: `python -m ... SPEC`, see `pipeline`.

vLLM-Omni starts two processes for each stage below this one; it is ended with all of them.
"""

import json
import sys
from pathlib import Path
from typing import Any

from omnicache_cli.engine.omni.wire import tensors_of

RESULTS = "outputs.json"
STAGE_SECONDS, ALL_SECONDS = 1200, 3600
"""How long the stages may take to start; vLLM-Omni's own 300 and 600 are few for a busy machine."""


def main(spec_path: str) -> None:
    """Send every prompt, one at a time, round by round; leave what came out in the folder."""
    from safetensors.torch import save_file
    from vllm_omni import Omni

    spec: dict[str, Any] = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    folder = Path(spec["folder"])
    omni = Omni(
        model=spec["model"],
        deploy_config=spec["deploy_config"],
        stage_init_timeout=STAGE_SECONDS,
        init_timeout=ALL_SECONDS,
    )
    outputs: list[dict[str, Any]] = []
    try:
        for number in range(spec["rounds"]):
            for prompt in spec["prompts"]:
                for one in omni.generate([{"prompt": prompt}], use_tqdm=False):
                    name = f"output-{len(outputs):06d}.safetensors"
                    tensors = tensors_of(one.multimodal_output or {})
                    if tensors:
                        save_file(tensors, folder / name)
                    outputs.append(
                        {
                            "round": number,
                            "stage_id": one.stage_id,
                            "type": one.final_output_type,
                            "token_ids": [list(each.token_ids) for each in one.outputs],
                            "tensors": name if tensors else None,
                            "error": one.error,
                        }
                    )
    finally:
        omni.close()
    (folder / RESULTS).write_text(json.dumps(outputs), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
