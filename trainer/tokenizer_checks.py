"""Check that models which receive the policy's token ids decode them to the same text."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from transformers import AutoTokenizer

from asyncrl.assets import resolve
from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError

logger = logging.getLogger(__name__)


class _TokenReader(NamedTuple):
    key: str
    path: str
    trust_remote_code: bool
    fix: str


def check_tokenizers(config: Config) -> None:
    """Compare the policy's tokenizer with those of the reward model and the critic, which receive its token ids.
    Blocking.

    A model may have additional tokens. A model without a tokenizer cannot be compared, which is logged.

    Raises:
        ConfigError: a model has another id for a token of the policy, so it would score another text.
    """
    readers = list(_readers(config))
    if not readers:
        return
    model = config.model
    policy = model.tokenizer_path or model.path
    vocabulary = _vocabulary(policy, model.trust_remote_code)
    for reader in readers:
        other = _vocabulary(reader.path, reader.trust_remote_code)
        if vocabulary is None or other is None:
            logger.warning(
                "%s=%s: no tokenizer can be loaded from %s, so it is not known whether the policy's token ids mean the "
                "same there",
                reader.key,
                reader.path,
                policy if vocabulary is None else reader.path,
            )
            continue
        differing = [token for token, number in vocabulary.items() if other.get(token) != number]
        if differing:
            token = min(differing, key=lambda token: vocabulary[token])
            raise ConfigError(
                f"{reader.key}={reader.path}: its tokenizer is not the policy's ({policy}): {len(differing)} of "
                f"{len(vocabulary)} tokens differ, {token!r} is {vocabulary[token]} for the policy and "
                f"{other.get(token, 'unknown')} there. It would read another text than was generated; {reader.fix}"
            )


def _readers(config: Config) -> Iterator[_TokenReader]:
    reward_model, critic = config.reward_model, config.critic
    if reward_model.placement == "worker" and reward_model.path is not None:
        fix = "use reward_model.placement=serve, which hands it the text"
        yield _TokenReader("reward_model.path", reward_model.path, reward_model.trust_remote_code, fix)
    if config.needs_critic and critic.path is not None:
        fix = "take a critic of the policy's family, or leave critic.path out"
        yield _TokenReader("critic.path", critic.path, config.model.trust_remote_code, fix)


def _vocabulary(path: str, trust_remote_code: bool) -> Mapping[str, int] | None:
    """Return ids by token; None: there is no tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve(path), trust_remote_code=trust_remote_code)
    except Exception as error:  # noqa: BLE001 - transformers raises errors of many kinds; the caller reports it
        logger.debug("no tokenizer in %s: %s", path, error)
        return None
    return tokenizer.get_vocab()
