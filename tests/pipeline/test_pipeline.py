"""The whole pipeline, thinker, talker and code2wav in their own processes, cache off and on.

Two starts of it, minutes each: one test for all of it.
"""

from pathlib import Path

from omnicache_cli.trace.run import Run
from omnicache_cli.trace.views import show_view
from omnicache_cli.verify.crossings import Crossed, Direction
from omnicache_cli.verify.pipeline_report import judge_pipeline
from omnicache_cli.verify.results import Verdict

DEPLOY = Path(__file__).parents[2] / "examples" / "omni-cpu.yaml"
PROMPT = (
    "<|im_start|>user\nThe cache remembers every full block of thirty-two tokens. How many?"
    "<|im_end|>\n<|im_start|>assistant\n"
)
NUM_TOKENS = 76  # of which two blocks of 32 are full
SENT_BY_THE_THINKER = {
    *("embed.prefill", "embed.tts_bos", "embed.tts_eos", "embed.tts_pad"),
    *("hidden_states.output", "ids.all", "ids.prompt", "meta.finished"),
}


def test_what_passes_between_stages_is_the_same_with_the_cache(
    omni_model: Path, tmp_path: Path
) -> None:
    from omnicache_cli.engine.omni.pipeline import run_pipeline, stage_hits

    runs = run_pipeline(str(omni_model), DEPLOY, [PROMPT], tmp_path)
    hits = stage_hits(runs)
    assert [(one.stage, one.is_cached, one.queried_tokens, one.hit_tokens) for one in hits] == [
        ("thinker", True, 2 * NUM_TOKENS, 64),
        ("talker", False, 0, 0),
        ("code2wav", False, 0, 0),
    ]

    verified = judge_pipeline(runs.off.crossings, runs.on.crossings, 1, hits)
    assert verified.verdict is Verdict.EQUAL
    sent = [one for one in verified.results if one.direction is Direction.SENT]
    thinker = {one.key: one.verdict for one in sent if one.stage == "thinker"}
    assert thinker == dict.fromkeys(SENT_BY_THE_THINKER, Crossed.EQUAL)
    received = [one for one in verified.results if one.direction is Direction.RECEIVED]
    talker = {one.key: one.verdict for one in received if one.stage == "talker"}
    assert talker == dict.fromkeys(SENT_BY_THE_THINKER, Crossed.EQUAL)
    given_out = [one for one in verified.results if one.direction is Direction.OUTPUT]
    audio = {one.key: one.verdict for one in given_out if one.stage == "code2wav"}
    assert audio == {"audio": Crossed.UNSTABLE, "sr": Crossed.EQUAL}

    traced = Run(runs.on.trace)
    report = show_view(traced, mode="--summary").report
    stages = {one["stage"]: one for one in report.result["stages"]}
    assert {name: one["stage_id"] for name, one in stages.items()} == {
        **{"thinker": 0, "talker": 1},
        "code2wav": 2,
    }
    assert {name: one["requests"] for name, one in stages.items()} == dict.fromkeys(stages, 2)
    assert len({one["engine"] for one in stages.values()}) == 3
    requests = show_view(Run(runs.on.trace), mode="--requests", engine="thinker").report
    assert [one["hit_tokens"] for one in requests.result["requests"]] == [0, 64]
