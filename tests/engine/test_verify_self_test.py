"""`verify --self-test` on real engines, and the LoRA batch that vLLM 0.30 gets wrong on a CPU."""

import json
from pathlib import Path

from omnicache_cli.verify.faults import Fault
from omnicache_cli.verify.results import Verdict
from omnicache_cli.verify.selftest import PLANTS
from tests.engine.test_trace_command import omnicache
from tests.engine.test_verify import ARGS, hits, verified

SESSIONS = [
    *("bfloat16, builtin", "bfloat16, vllm-omni"),
    *("float32, builtin", "float32, vllm-omni"),
]


def test_every_planted_fault_is_caught_and_named(tiny_text_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    sizes = ["--block-size", "32", "--max-model-len", "1024", "--num-gpu-blocks-override", "130"]
    code = omnicache("verify", tiny_text_model, "--self-test", *sizes, "--quiet", "-o", out)
    found = json.loads(out.read_text())
    assert (code, found["passed"], found["false_alarms"]) == (0, True, [])
    assert found["num_clean_pairs"] >= 200
    planted = [one for one in found["faults"] if one["planted"]]
    assert {one["session"] for one in planted} == set(SESSIONS)
    assert len(planted) == len(SESSIONS) * len(PLANTS) - 2
    assert all(one["caught"] and one["named"] for one in planted)
    left_out = {(one["name"], one["session"]) for one in found["faults"] if not one["planted"]}
    assert left_out == {("payload-as-rows", one) for one in SESSIONS if "omni" in one}


def test_an_adapter_alone_is_right_and_a_mixed_batch_is_flagged(
    tmp_path: Path,
) -> None:
    """A request without an adapter beside one with: vLLM 0.30's CPU kernels give it the adapter.

    Should a later vLLM mend that, `lora-mixed` belongs to the scenarios that always run.
    """
    from omnicache_cli.engine.options import lora_args
    from omnicache_cli.engine.tiny_models import build_tiny_model
    from omnicache_cli.trace.workload import Lora, Prompt

    build_tiny_model("lora", tmp_path / "lora")
    lora = Lora(str(tmp_path / "lora" / "adapter-a"), "adapter-a")
    args = {**ARGS, **lora_args([Prompt(None, [], lora=lora)])}
    result = verified(tmp_path / "lora", args, "lora", "lora-mixed", loras=(lora,))
    assert hits(result) == {("lora", "hit-0"): 64, ("lora-mixed", "hit-0"): 64}
    alone = {one.verdict for one in result.pairs if one.scenario == "lora"}
    assert alone == {Verdict.EQUAL}
    wrong = [one for one in result.pairs if one.verdict is Verdict.CORRUPTION]
    assert {(one.scenario, one.request) for one in wrong} == {("lora-mixed", "other-0")}
    assert Fault.OTHER_ADAPTER in {one.fault for one in wrong}
    rows = next(one for one in wrong if one.key == "layers.0")
    assert rows.diagnosis.endswith("it is that of the same prompt with adapter-a")
