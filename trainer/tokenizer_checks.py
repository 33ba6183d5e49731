"""Check that models which receive the policy's token ids decode them to the same text."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from asyncrl.assets import resolve
from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError

logger = logging.getLogger(__name__)


def check_tokenizers(config: Config) -> None:
    """Compare the policy's tokenizer with those of the teacher, the reward model and the critic, which receive its
    token ids. Blocking.

    A model may have additional tokens. A model without a tokenizer cannot be compared, which is logged.

    Raises:
        ConfigError: a model has another id for a token of the policy, so it would score another text.
    """
    model, reward_model, critic = config.model, config.reward_model, config.critic
    readers: list[tuple[str, str, bool, str]] = []
    if reward_model.placement == "worker" and reward_model.path is not None:
        fix = "use reward_model.placement=serve, which sends it text instead of token ids"
        readers.append(("reward_model.path", reward_model.path, reward_model.trust_remote_code, fix))
    if config.needs_critic and critic.path is not None:
        fix = "take a critic of the policy's family, or leave critic.path out"
        readers.append(("critic.path", critic.path, model.trust_remote_code, fix))
    if config.teacher.path is not None:
        fix = "take a teacher of the policy's family"
        readers.append(("teacher.path", config.teacher.path, model.trust_remote_code, fix))
    if not readers:
        return
    policy = model.tokenizer_path or model.path
    vocabulary = _vocabulary(policy, model.trust_remote_code)
    for key, path, trust_remote_code, fix in readers:
        other = _vocabulary(path, trust_remote_code)
        if vocabulary is None or other is None:
            logger.warning(
                "%s=%s: no tokenizer can be loaded from %s, so it is unknown whether this model reads the policy's "
                "token ids as the same text",
                key,
                path,
                policy if vocabulary is None else path,
            )
            continue
        differing = [token for token, number in vocabulary.items() if other.get(token) != number]
        if differing:
            token = min(differing, key=lambda token: vocabulary[token])
            raise ConfigError(
                f"{key}={path}: its tokenizer is not the policy's ({policy}): {len(differing)} of "
                f"{len(vocabulary)} tokens differ, {token!r} is {vocabulary[token]} for the policy and "
                f"{other.get(token, 'unknown')} for this model. It would not read the text that was generated; {fix}"
            )


def _vocabulary(path: str, trust_remote_code: bool) -> Mapping[str, int] | None:
    """Return the ids by token; None if there is no tokenizer."""
    from transformers import AutoTokenizer  # takes 2 s, and most runs have one model only

    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve(path), trust_remote_code=trust_remote_code)
    except Exception as error:  # noqa: BLE001 - transformers raises errors of many kinds; the caller reports it
        logger.debug("no tokenizer in %s: %s", path, error)
        return None
    return tokenizer.get_vocab()
