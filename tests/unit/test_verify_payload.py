"""What a stage hands on beside its rows: as the model put it out."""

import pytest

torch = pytest.importorskip("torch", reason="payloads are torch tensors")

from torch import Tensor  # noqa: E402

from omnicache_cli.verify.payload import what_became  # noqa: E402

BOS = torch.arange(4.0).reshape(1, 1, 4)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (BOS, BOS.clone()),
        (None, None),
        (torch.full((2,), torch.nan), torch.full((2,), torch.nan)),
        (torch.empty(0, 4), torch.empty(0, 4)),
    ],
)
def test_what_comes_through_bit_for_bit_is_as_it_was(
    given: Tensor | None, found: Tensor | None
) -> None:
    assert what_became(given, found) is None


@pytest.mark.parametrize(
    ("given", "found", "sentence"),
    [
        (BOS, None, "the model put it out, and it was not handed on"),
        (None, BOS, "(1, 1, 4) float32 was handed on, and the model did not put it out"),
        (BOS, BOS[..., :2], "(1, 1, 2) float32 was handed on, the model put out (1, 1, 4) float32"),
        (
            BOS,
            BOS.bfloat16(),
            "(1, 1, 4) bfloat16 was handed on, the model put out (1, 1, 4) float32",
        ),
        (
            BOS,
            BOS + 0.5,
            "what was handed on is off by up to 0.5 from what the model put out",
        ),
    ],
)
def test_what_does_not_is_told(given: Tensor | None, found: Tensor | None, sentence: str) -> None:
    assert what_became(given, found) == sentence
