"""A reward model in this process: a sequence classifier with one label that scores conversations.

It needs torch and transformers only, so it can be tested and used without Ray.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from asyncrl.assets import resolve
from asyncrl.config.sections.trainer import RewardModelConfig
from asyncrl.core.failures import ConfigError, DataError
from rollouter.rewards.conversation import ScoredConversation, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

KEY = "reward_model.path"
FIX = "name a sequence-classification model with one label, saved by save_pretrained"


class EncodedConversation(NamedTuple):
    """The model's input for one conversation."""

    ids: list[int]
    types: list[int]
    """The part of the pair of prompt and response to which each token belongs (`token_type_ids`), or all 0."""


class RewardClassifier:
    """Scores conversations with one model on one device."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Wrap a model with one label, which is on its device already, and its tokenizer."""
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._pad_id: int | None = model.config.pad_token_id
        self._takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
        limits = (getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length)
        self.max_tokens: int = min((limit for limit in limits if limit is not None), default=2**31)
        """The number of tokens of the longest conversation that the model accepts."""

    @classmethod
    def load(cls, config: RewardModelConfig, *, device: Literal["cpu", "cuda"] = "cpu") -> RewardClassifier:
        """Load and check the model: in the dtype of its files on a GPU, or in float32 on CPU.

        Raises:
            ConfigError: the path is null, or has no model, no tokenizer or no safetensors, or the model has several
                labels or an untrained head. The message is one line.
        """
        import transformers

        if config.path is None:
            raise ConfigError(f"{KEY}: null, and reward_model.placement is {config.placement}: {FIX}")
        trust = config.trust_remote_code
        try:
            path = resolve(config.path)
            settings = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust)
            if settings.num_labels != 1:
                raise ConfigError(f"{KEY}={config.path}: the model has {settings.num_labels} labels, not one; {FIX}")
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
            model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
                path,
                config=settings,
                use_safetensors=True,
                trust_remote_code=trust,
                output_loading_info=True,
                dtype="auto" if device == "cuda" else torch.float32,
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{KEY}={config.path}: no reward model can be loaded from there: {reason}; {FIX}"
            ) from error
        if missing := sorted(report["missing_keys"]):
            raise ConfigError(
                f"{KEY}={config.path}: its files have no {', '.join(missing[:3])}, which would be random numbers: "
                f"this is not a trained reward model; {FIX}"
            )
        return cls(model.to(device), tokenizer)

    @torch.inference_mode()
    def score(self, conversations: Sequence[ScoredConversation]) -> list[float | DataError]:
        """Score all conversations in one forward pass. Those that cannot be scored get an error instead of a number."""
        results: list[float | DataError] = [0.0] * len(conversations)
        encoded: dict[int, EncodedConversation] = {}
        for number, conversation in enumerate(conversations):
            try:
                encoded[number] = self.encode(conversation)
            except DataError as error:
                results[number] = error
        if encoded:
            for number, value in zip(encoded, self._forward(list(encoded.values())), strict=True):
                finite = DataError(f"the reward model's score of a conversation is {value}, which is not finite")
                results[number] = value if math.isfinite(value) else finite
        return results

    def encode(self, conversation: ScoredConversation) -> EncodedConversation:
        """Encode with the model's chat template. Without a template, encode the pair of prompt text and response.

        Raises:
            DataError: the template refuses the messages, or the conversation is too long for the model.
        """
        tokenizer = self._tokenizer
        if tokenizer.chat_template is not None:
            answer = {"role": "assistant", "content": conversation.response}
            messages = [*(dict(message) for message in conversation.messages), answer]
            try:
                ids: list[int] = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
                types = [0] * len(ids)
            except Exception as error:  # a template may raise anything on messages that it does not expect
                raise DataError(f"the reward model's chat template refuses a conversation: {error}") from error
        else:
            prompt = "\n".join(text_of(message) for message in conversation.messages)
            pair = tokenizer(prompt, conversation.response)
            ids = pair["input_ids"]
            types = pair.get("token_type_ids", [0] * len(ids))
        if not 0 < len(ids) <= self.max_tokens:
            raise DataError(
                f"a conversation of {len(ids)} tokens cannot be scored: the reward model takes 1 to {self.max_tokens} "
                "tokens; lower data.max_prompt_length or rollout.response_length"
            )
        return EncodedConversation(ids, types)

    def _forward(self, rows: list[EncodedConversation]) -> list[float]:
        """Run one padded forward pass. Padding does not change a row's score."""
        # The head reads the last token that is not padding. A model without a padding token is given one that no row
        # contains, so that the head reads each row's last token.
        used = {token for row in rows for token in row.ids}
        pad = self._pad_id if self._pad_id is not None else next(token for token in range(2**31) if token not in used)
        self._model.config.pad_token_id = pad
        width, device = max(len(row.ids) for row in rows), self._model.device
        inputs = {"input_ids": torch.tensor([_padded(row.ids, width, pad) for row in rows], device=device)}
        if self._takes_types:
            inputs["token_type_ids"] = torch.tensor([_padded(row.types, width, 0) for row in rows], device=device)
        lengths = torch.tensor([len(row.ids) for row in rows], device=device)
        mask = torch.arange(width, device=device) < lengths[:, None]
        logits = self._model(**inputs, attention_mask=mask.long()).logits
        return logits[:, 0].float().tolist()


def _padded(row: list[int], width: int, pad: int) -> list[int]:
    return row + [pad] * (width - len(row))
