"""The work that is compared: models of three sizes with equal and with long-tailed responses, as jobs for the peers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

from asyncrl.assets import resolve
from benchmarks.models import SHAPES, TransformerShape, dimensions, save_tokenizer

GROUP = 8
"""Responses of a prompt."""
PROMPT_TOKENS = 64
LENGTHS = ("equal", "long")
EOS = 2
NEVER = -2000.0
"""Log-odds of ending a response after a token. Training shrinks them, to a tenth within 40 steps."""


@dataclass(frozen=True)
class Size:
    """A model and how much of it a step trains."""

    shape: TransformerShape
    prompts: int
    """Prompts of a step."""
    tokens: int
    """Mean length of a response."""
    steps: int
    micro_batch: int
    """Responses of a micro-batch, so that the logits of a large vocabulary fit into memory."""
    learning_rate: float = 5e-4


SIZES = {
    "0.9M": Size(TransformerShape(128, 4, 4, 4, 384, 103, 1024), prompts=8, tokens=64, steps=40, micro_batch=64),
    "8M": Size(TransformerShape(320, 6, 5, 5, 960, 103, 1024), prompts=8, tokens=128, steps=12, micro_batch=64),
    "135M": Size(SHAPES["135M"], prompts=4, tokens=64, steps=6, micro_batch=16, learning_rate=5e-5),
}
"""`135M` has the shape of SmolLM2-135M. Its weights are random, too: speed does not depend on them, and responses have
the same lengths in every system, which a larger learning rate would change within three steps."""


@dataclass(frozen=True)
class Job:
    """One training run, as the JSON file that a peer reads."""

    peer: str
    model: str
    prompts: str
    """JSON lines with a `prompt` of messages, as asyncrl and TRL read them."""
    directory: str
    """Directory for the peer's own files, among them `result.json`."""
    group: int
    samples: int
    """Prompts of a step."""
    prompt_tokens: int
    max_tokens: int
    """Maximum length of a response."""
    micro_batch: int
    steps: int
    learning_rate: float
    cores: int

    @property
    def file(self) -> Path:
        return Path(self.directory) / "job.json"

    def write(self) -> None:
        Path(self.directory).mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass(frozen=True)
class Workload:
    """A model with a distribution of response lengths."""

    size: str
    lengths: str
    steps: int

    @property
    def name(self) -> str:
        return f"{self.size} {self.lengths}"

    @property
    def max_tokens(self) -> int:
        return SIZES[self.size].tokens * (1 if self.lengths == "equal" else 4)

    def prepare(self, directory: Path) -> None:
        """Write the model and the prompts, which all peers read."""
        size = SIZES[self.size]
        log_odds = NEVER if self.lengths == "equal" else -math.log(size.tokens - 1)
        make_model(directory / "model", size.shape, log_odds)
        rows = Path(resolve("asyncrl://quickstart/train.jsonl")).read_text(encoding="utf-8").splitlines()
        text = "\n".join(islice(cycle(rows), self.steps * size.prompts))
        (directory / "prompts.jsonl").write_text(text + "\n", encoding="utf-8")

    def job(self, peer: str, prepared: Path, directory: Path, cores: int) -> Job:
        size = SIZES[self.size]
        return Job(
            peer=peer,
            model=str(prepared / "model"),
            prompts=str(prepared / "prompts.jsonl"),
            directory=str(directory),
            group=GROUP,
            samples=size.prompts,
            prompt_tokens=PROMPT_TOKENS,
            max_tokens=self.max_tokens,
            micro_batch=size.micro_batch,
            steps=self.steps,
            learning_rate=size.learning_rate,
            cores=cores,
        )


def make_model(directory: Path, shape: TransformerShape, log_odds: float) -> None:
    """Save a random Qwen 2 in float32 that ends a response after each token with about the given log-odds.

    The files alone decide how long responses are, so no system needs an option or a patch for that. The first element
    of the residual stream is a constant which no layer reads or writes and which training changes slowly, because it is
    large, and the logit of the end-of-sequence token is a multiple of it alone.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**dimensions(shape), bos_token_id=1, eos_token_id=EOS, pad_token_id=0)).eval()
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = 4 * embedding.std() * math.sqrt(shape.hidden_size)
        embedding[EOS] = 0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
            layer.input_layernorm.weight[0] = 0
            layer.post_attention_layernorm.weight[0] = 0
        states = model.model(torch.randint(3, shape.vocab_size, (8, 64))).last_hidden_state.flatten(0, 1)
        logits = states @ embedding.T
        logits[:, EOS] = -torch.inf
        embedding[EOS, 0] = (logits.logsumexp(-1).mean() + log_odds) / states[:, 0].mean()
    model.save_pretrained(directory)
    save_tokenizer(directory, shape.vocab_size)
