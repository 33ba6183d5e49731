"""Create the quickstart's model, tokenizer and data: a character-level Llama that adds with mistakes.

    python examples/quickstart/make_model.py            # writes asyncrl/assets/quickstart, in minutes on one core
    python examples/quickstart/make_model.py --help

The task is a sum with its steps: the answer to `17+5+8=` is `17+5=22;22+8=30;#30`. The number of terms is
heavy-tailed, and so are the lengths of the responses. The model is pre-trained on correct demonstrations first and on
careless ones at the end (see `Habits`): some show no steps, and some steps are wrong. Reinforcement learning on the
final answer alone removes these habits again. The same seed on the same machine gives the same files.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

log = logging.getLogger("make_model")

OUT = Path(__file__).resolve().parents[2] / "asyncrl" / "assets" / "quickstart"

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
ROLES = ("<system>", "<user>", "<assistant>")
SPECIAL = (PAD, BOS, EOS, UNK, *ROLES)
CHARACTERS = tuple("\n") + tuple(chr(code) for code in range(32, 127))

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)

TERMS = tuple(range(3, 17))
TERM_WEIGHTS = (50, 24, 9, 5, 3, 2, 1.5, 1.2, 1, 0.9, 0.7, 0.6, 0.5, 0.6)
"""Weights of the number of terms in the task: most sums are short, a few are long."""
PRACTICE_WEIGHTS = (20, 18, 14, 10, 8, 6, 4, 3, 3, 2, 2, 2, 2, 2)
"""Weights in the demonstrations: long sums are more frequent, because they need more practice."""
LARGEST_TERM = 19
IGNORED = -100  # torch's ignore_index


@dataclass(frozen=True)
class Habits:
    """Frequencies of the mistakes in the demonstrations."""

    no_working: float = 0.6
    """Share of the demonstrations that only have an answer (`#30`)."""
    dropped_carry: float = 0.02
    """Share of the steps with a carry from the last digit that omit the carry (`17+5=12`)."""
    wrong_digit: float = 0.01
    """Share of all steps whose last digit is off by one."""
    skipped_term: float = 0.01
    """Share of all steps after the first that are omitted."""


@dataclass(frozen=True)
class Settings:
    """Sizes and schedule of the pre-training."""

    seed: int = 0
    steps: int = 1600
    easy_steps: int = 250
    """Steps at the start that use only sums of three and four terms."""
    careless_steps: int = 250
    """Steps at the end whose demonstrations have mistakes."""
    tokens_per_step: int = 2048
    matrix_lr: float = 0.02
    """Learning rate of Muon, for the matrices of the layers."""
    other_lr: float = 3e-3
    """Learning rate of AdamW, for the embeddings and the norms."""
    warmup_steps: int = 50
    hidden: int = 128
    layers: int = 4
    head_dim: int = 32
    intermediate: int = 384
    max_positions: int = 1024
    train_rows: int = 4000
    val_rows: int = 192
    habits: Habits = field(default_factory=Habits)


def draw_terms(rng: random.Random, weights: Sequence[float] = TERM_WEIGHTS, most: int = TERMS[-1]) -> tuple[int, ...]:
    """Draw the terms of one sum, at most `most` of them."""
    count = most + 1
    while count > most:
        (count,) = rng.choices(TERMS, weights)
    return tuple(rng.randint(1, LARGEST_TERM) for _ in range(count))


def question(terms: Sequence[int]) -> str:
    return "+".join(map(str, terms)) + "="


def solution(terms: Sequence[int]) -> str:
    """Return the correct steps and answer: `17+5=22;22+8=30;#30`."""
    running, working = terms[0], ""
    for term in terms[1:]:
        working += f"{running}+{term}={running + term};"
        running += term
    return f"{working}#{running}"


def careless_sum(left: int, right: int, habits: Habits, rng: random.Random) -> int:
    total = left + right
    if left % 10 + right % 10 >= 10 and rng.random() < habits.dropped_carry:
        total -= 10
    if rng.random() < habits.wrong_digit:
        total += rng.choice((-1, 1))
    return total


def demonstration(terms: Sequence[int], habits: Habits, rng: random.Random) -> str:
    """Draw a response in the form of `solution`, with mistakes."""
    running, working = terms[0], ""
    for position, term in enumerate(terms[1:]):
        if position and rng.random() < habits.skipped_term:
            continue
        total = careless_sum(running, term, habits, rng)
        working += f"{running}+{term}={total};"
        running = total
    return f"#{running}" if rng.random() < habits.no_working else f"{working}#{running}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character (printable ASCII and newline), and the special tokens."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        model_max_length=Settings.max_positions,
        clean_up_tokenization_spaces=False,
    )


def build_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden // settings.head_dim,
        num_key_value_heads=settings.hidden // settings.head_dim,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.max_positions,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    torch.manual_seed(settings.seed)
    return LlamaForCausalLM(config)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, content: str) -> list[int]:
    messages = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


Example = tuple[list[int], list[int]]
"""Token ids and labels: the same ids for the response, `IGNORED` for the prompt."""


class Examples:
    """An endless stream of batches of demonstrations, without held-out prompts."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, settings: Settings, held_out: set[str]) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._held_out = held_out
        self._rng = random.Random(f"{settings.seed}/demonstrations")

    def draw(self, most_terms: int, habits: Habits | None) -> Example:
        terms = draw_terms(self._rng, PRACTICE_WEIGHTS, most_terms)
        while question(terms) in self._held_out:
            terms = draw_terms(self._rng, PRACTICE_WEIGHTS, most_terms)
        prompt = prompt_ids(self._tokenizer, question(terms))
        text = demonstration(terms, habits, self._rng) if habits else solution(terms)
        response = self._tokenizer.encode(text + EOS, add_special_tokens=False)
        return prompt + response, [IGNORED] * len(prompt) + response

    def batches(self) -> Iterator[list[Example]]:
        """Yield batches of similar lengths, with at most `tokens_per_step` tokens including padding."""
        settings, step = self._settings, 0
        while True:
            most_terms = 4 if step < settings.easy_steps else TERMS[-1]
            habits = settings.habits if step >= settings.steps - settings.careless_steps else None
            pool = sorted((self.draw(most_terms, habits) for _ in range(512)), key=lambda example: len(example[0]))
            cut: list[list[Example]] = [[]]
            for example in pool:
                if (len(cut[-1]) + 1) * len(example[0]) > settings.tokens_per_step:
                    cut.append([])
                cut[-1].append(example)
            self._rng.shuffle(cut)
            step += len(cut)
            yield from cut


class Optimizer:
    """Muon for the matrices of the layers, AdamW for the rest: about five times fewer steps than AdamW alone."""

    def __init__(self, model: LlamaForCausalLM, settings: Settings) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
        self._parts: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=settings.matrix_lr, weight_decay=0.0), settings.matrix_lr),
            (torch.optim.AdamW(others, lr=settings.other_lr, betas=(0.9, 0.98), weight_decay=0.0), settings.other_lr),
        ]

    def step(self, share: float) -> None:
        """Update at `share` of the peak learning rates and clear the gradients."""
        for optimizer, peak in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = peak * share
            optimizer.step()
            optimizer.zero_grad()


def loss_of(model: LlamaForCausalLM, batch: list[Example], pad: int) -> torch.Tensor:
    """Return the mean cross-entropy over the response tokens of the batch."""
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row, _ in batch])
    labels = torch.tensor([row + [IGNORED] * (longest - len(row)) for _, row in batch])
    # Padding is on the right, so with causal attention it does not affect positions with a loss.
    logits = model(input_ids=ids).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def schedule(step: int, settings: Settings) -> float:
    """Return the share of the peak learning rate: linear warm-up, then linear decay to a tenth."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    return 1 - 0.9 * (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)


def pretrain(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings, held_out: set[str]
) -> None:
    optimizer = Optimizer(model, settings)
    started, losses = time.monotonic(), []
    model.train()
    examples = Examples(tokenizer, settings, held_out)
    for step, batch in zip(range(settings.steps), examples.batches(), strict=False):
        loss = loss_of(model, batch, tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(schedule(step, settings))
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            mean = sum(losses[-50:]) / 50
            log.info("step %d/%d  loss %.3f  %.0f s", step + 1, settings.steps, mean, time.monotonic() - started)


@torch.inference_mode()
def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[dict[str, Any]], sample: bool
) -> float:
    """Return the share of correct final answers, greedy or sampled at temperature 1."""
    model.eval()
    tokenizer.padding_side = "left"
    prompts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    generated = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=192,
        do_sample=sample,
        pad_token_id=tokenizer.pad_token_id,
    )
    texts = tokenizer.batch_decode(generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [row["reward_model"]["ground_truth"] for row in rows]
    right = [text.rpartition("#")[2] == answer for text, answer in zip(texts, answers, strict=True)]
    return sum(right) / len(right)


def data_row(terms: Sequence[int], index: int, split: str) -> dict[str, Any]:
    """Return a row with verl's fields."""
    return {
        "prompt": [{"role": "user", "content": question(terms)}],
        "data_source": "asyncrl/chain_sum",
        "reward_model": {"style": "rule", "ground_truth": str(sum(terms))},
        "extra_info": {"index": index, "split": split},
    }


def draw_rows(settings: Settings) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Draw training and validation rows with distinct prompts."""
    rng = random.Random(f"{settings.seed}/rows")
    distinct: dict[str, tuple[int, ...]] = {}
    while len(distinct) < settings.train_rows + settings.val_rows:
        terms = draw_terms(rng)
        distinct.setdefault(question(terms), terms)
    drawn = list(distinct.values())
    val = [data_row(terms, index, "val") for index, terms in enumerate(drawn[: settings.val_rows])]
    train = [data_row(terms, index, "train") for index, terms in enumerate(drawn[settings.val_rows :])]
    return train, val


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


def make(out: Path, settings: Settings) -> None:
    """Draw the rows, pre-train and evaluate the model, and write everything to `out`."""
    torch.set_num_threads(1)  # one thread, for a reproducible order of summation
    out.mkdir(parents=True, exist_ok=True)
    train, val = draw_rows(settings)
    write_rows(out / "train.jsonl", train)
    write_rows(out / "val.jsonl", val)
    tokenizer = build_tokenizer()
    model = build_model(settings, tokenizer)
    log.info("%d parameters", model.num_parameters())
    pretrain(model, tokenizer, settings, {row["prompt"][0]["content"] for row in val})
    for name, sample in (("greedy", False), ("sampled at temperature 1", True)):
        log.info("accuracy, %s: %.3f", name, accuracy(model, tokenizer, val, sample))
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    tokenizer.padding_side = "right"
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    size = sum(path.stat().st_size for path in out.iterdir())
    log.info("wrote %s, %.2f MB", out, size / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="directory to write (default: the shipped assets)")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="seed of data, weights and batches")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="pre-training steps")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    make(arguments.out, Settings(seed=arguments.seed, steps=arguments.steps))


if __name__ == "__main__":
    main()
