"""A model's tokenizer for workloads that are text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnicache_cli.engine.options import first_line
from omnicache_cli.errors import BadInputError


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """Of a model folder. Satisfies `omnicache_cli.simulate.forms.Tokenizer`."""

    name: str
    tokenizer: Any

    def text(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    def answer(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """By the model's chat template. BadInputError: it has none, or refuses the messages."""
        if self.tokenizer.chat_template is None:
            raise BadInputError(
                f"{self.name} has no chat template, and the workload has messages; name a model "
                "that has one, or count words with --tokenizer pieces"
            )
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # jinja's, which templates raise on purpose
            raise BadInputError(
                f"the chat template of {self.name} refuses a conversation: {first_line(error)}; "
                "leave it out"
            ) from error
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def model_tokenizer(name: str) -> ModelTokenizer:
    """BadInputError: there is none."""
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise BadInputError(f"no tokenizer in {name}: there is no such folder; name one of a model")
    from transformers import AutoTokenizer

    try:
        return ModelTokenizer(name, AutoTokenizer.from_pretrained(name))
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"no tokenizer in {name}: {first_line(error)}; name the folder of a model"
        ) from error
