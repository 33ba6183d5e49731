"""Prompts with images in a real vLLM engine, compared with the Trainer's model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from asyncrl.config.schema import Config
from asyncrl.config.sections.data import ModelConfig
from asyncrl.config.sections.trainer import EngineConfig
from asyncrl.core.failures import DataError
from asyncrl.core.ports import GenerateRequest, WeightsVersion
from asyncrl.core.types import FinishReason, Media, Prompt, Row, Sample, SampleId, Turn, join_turns
from rollouter.prompts.chat_template import load_tokenizer
from rollouter.prompts.media import VisionEncoder
from rollouter.serving.options import serving_options
from tests.fakes.vision_model import png, write_vision_model
from trainer.batches import RowRules, prepare_sample
from trainer.engines.base import EngineSpec
from trainer.engines.registry import new_engine
from trainer.workers.tensors import to_batch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]
ONE, TWO = Media("image", png(1)), Media("image", png(2))
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(path=str(write_vision_model(tmp_path_factory.mktemp("vision"))))


class Replica:
    """The part of a replica that runs requests, without Ray around it."""

    def __init__(self, config: Config) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from rollouter.serving.replica.generation import TokenGeneration
        from rollouter.serving.replica.health import ReplicaHealth
        from rollouter.serving.replica.request_phases import EnginePauses

        options = serving_options(config, namespace="test", gpus=False)
        arguments = AsyncEngineArgs(model=config.model.path, **options.llm_config["engine_kwargs"])
        self.llm = AsyncLLM.from_engine_args(arguments)
        self.health = ReplicaHealth(replica="r", node_id="n", engine_s=60)
        gate = asyncio.Event()
        gate.set()
        self._generation = TokenGeneration(self.llm, self.health, gate, EnginePauses())
        self._numbers = iter(range(1000))

    async def run(self, *requests: GenerateRequest) -> list[Turn]:
        turns: dict[int, Turn] = {}
        named = [replace(request, request_id=f"{request.request_id}-{next(self._numbers)}") for request in requests]
        async for batch in self._generation.run(named):
            if isinstance(batch, list):
                for delta in batch:
                    turns[delta.number] = join_turns(turns.get(delta.number), delta.turn)
        return [turns[number] for number in range(len(requests))]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(model: ModelConfig) -> AsyncIterator[Replica]:
    config = Config(model=model, rollout={"max_model_len": 256, "max_num_seqs": 4, "cpu_kv_cache_gib": 1})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in serving_options(config, namespace="test", gpus=False).env_vars.items():
            patch.setenv(name, value)
        made = Replica(config)
        await made.llm.update_weight_version("0")
        yield made
        made.llm.shutdown()


def make_prompt(model: ModelConfig, *media: Media) -> Prompt:
    tokenizer = load_tokenizer(model)
    text = "<|im_start|>user\nlook: " + "<image>" * len(media) + "?<|im_end|>\n<|im_start|>assistant\n"
    vision = VisionEncoder(model, tokenizer)
    ids = vision.encode(text, media, "here") if media else tokenizer(text, add_special_tokens=False)["input_ids"]
    return Prompt(np.array(ids, dtype=np.int32), media=media)


def request(prompt: Prompt, sampling: Mapping[str, object] = GREEDY, so_far: Turn | None = None) -> GenerateRequest:
    return GenerateRequest("a", prompt.prompt_ids, sampling, so_far, prompt.media)


def trained_log_probs(model: ModelConfig, prompt: Prompt, turn: Turn) -> np.ndarray:
    """Return the log-probs that the Trainer computes."""
    mask = np.ones(len(turn.response_ids), dtype=np.bool_)
    row = Row(
        prompt.prompt_ids, turn.response_ids, mask, turn.rollout_log_probs, turn.spans, FinishReason.LENGTH, reward=0.0
    )
    sample = Sample(SampleId(0, 1), (row,), media=prompt.media)
    rules = RowRules(mask_beyond=None, group_filter=None, vocab_size=None)
    rows = prepare_sample(sample, lease_id=1, trainer_version=0, rules=rules).rows
    engine = new_engine(EngineSpec("language_model", model, EngineConfig(device="cpu", strategy="local")))
    return engine.infer(to_batch(rows))["log_probs"][0].numpy()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("media", [(ONE,), (ONE, TWO), ()])
async def test_engine_and_trainer_compute_equal_log_probs(
    model: ModelConfig, replica: Replica, media: tuple[Media, ...], sampling: Mapping[str, object]
) -> None:
    """Both get the same ids, because vLLM refuses placeholders that differ from those it would write."""
    prompt = make_prompt(model, *media)
    (turn,) = await replica.run(request(prompt, sampling))
    assert len(turn.response_ids) == 12
    np.testing.assert_allclose(turn.rollout_log_probs, trained_log_probs(model, prompt, turn), atol=2e-4)


async def test_the_placeholders_of_prompts_equal_those_of_vllm(model: ModelConfig, replica: Replica) -> None:
    prompt = make_prompt(model, ONE, TWO)
    plain = load_tokenizer(model)("<|im_start|>user\nlook: <image><image>?<|im_end|>\n<|im_start|>assistant\n")[
        "input_ids"
    ]
    from asyncrl.storage.media import frames_of

    raw = {"prompt_token_ids": plain, "multi_modal_data": {"image": [frames_of(one)[0] for one in prompt.media]}}
    (theirs,) = await replica.llm.renderer.render_cmpl_async([raw])
    assert theirs["prompt_token_ids"] == prompt.prompt_ids.tolist()


async def test_the_image_changes_the_log_probs(model: ModelConfig, replica: Replica) -> None:
    one, other = make_prompt(model, ONE), make_prompt(model, TWO)
    assert (one.prompt_ids == other.prompt_ids).all()
    turns = await replica.run(request(one), request(other), request(one))
    np.testing.assert_array_equal(turns[0].response_ids, turns[2].response_ids)
    assert np.abs(turns[0].rollout_log_probs[0] - turns[1].rollout_log_probs[0]) > 1e-3


async def test_a_cut_turn_continues_with_its_image(model: ModelConfig, replica: Replica) -> None:
    prompt = make_prompt(model, ONE)
    (whole,) = await replica.run(request(prompt))
    head = Turn(whole.response_ids[:5], whole.rollout_log_probs[:5], whole.spans, FinishReason.ABORTED)
    (rest,) = await replica.run(request(prompt, so_far=head))
    np.testing.assert_array_equal(rest.response_ids, whole.response_ids[5:])
    np.testing.assert_allclose(rest.rollout_log_probs, whole.rollout_log_probs[5:], atol=2e-4)


async def test_placeholders_that_do_not_match_the_images_are_refused(model: ModelConfig, replica: Replica) -> None:
    prompt = make_prompt(model, ONE)
    with pytest.raises(DataError, match="vLLM finds placeholders of 1 images in its tokens, but the prompt has 2"):
        await replica.run(request(replace(prompt, media=(ONE, TWO))))


async def test_features_of_other_weights_are_not_reused(model: ModelConfig, replica: Replica) -> None:
    from rollouter.serving.replica.generation import media_input

    prompt = make_prompt(model, ONE)
    inputs = [
        await media_input(replica.llm.renderer, prompt.prompt_ids.tolist(), prompt.media, s) for s in ("0-1", "0-2")
    ]
    hashes = [one["mm_hashes"]["image"][0] for one in inputs]
    assert hashes[0] != hashes[1] and all(one["prompt_token_ids"] == prompt.prompt_ids.tolist() for one in inputs)
    replica.health.weights_version = WeightsVersion(0, 3)
    before, after = await replica.run(request(prompt)), await replica.run(request(prompt))
    np.testing.assert_array_equal(before[0].response_ids, after[0].response_ids)
