"""Make the quickstart's model, tokenizer and data: a character-level Llama that adds, and slips.

    python examples/quickstart/make_model.py            # writes asyncrl/assets/quickstart, some minutes on one core
    python examples/quickstart/make_model.py --help

The task is a sum with its working shown: `17+25+8=` is answered by `17+25=42;42+8=50;#50`. The number of terms is
heavy-tailed, so the lengths of the responses are too. The model is pre-trained on demonstrations in which some steps
are wrong on purpose (see `Slips`): it learns how to add and how to slip, and reinforcement learning on the final answer
alone can take the slips away again. Everything is drawn from one seed; the same seed on the same machine gives the same files.
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

TERMS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)
TERM_WEIGHTS = (46, 27, 11, 5, 3, 2, 1, 1, 1, 1, 0.7, 0.7, 0.6)
LARGEST_TERM = 99
IGNORED = -100  # torch's ignore_index: a position without a loss


@dataclass(frozen=True)
class Slips:
    """How often a demonstrated step goes wrong: what the base model has to unlearn."""

    dropped_carry: float = 0.45
    """Of the steps with a carry out of the ones: share whose tens miss it (`17+25=32`)."""
    wrong_digit: float = 0.04
    """Of all steps: share whose last digit is off by one."""
    skipped_term: float = 0.03
    """Of all steps after the first: share that are left out."""


@dataclass(frozen=True)
class Settings:
    """Sizes and schedule of the pre-training. Times are those of one core."""

    seed: int = 0
    steps: int = 700
    tokens_per_step: int = 4096
    lr: float = 3e-3
    warmup_steps: int = 50
    hidden: int = 128
    layers: int = 4
    head_dim: int = 32
    intermediate: int = 384
    max_positions: int = 1024
    train_rows: int = 4000
    val_rows: int = 192
    slips: Slips = field(default_factory=Slips)


def draw_terms(rng: random.Random) -> tuple[int, ...]:
    (count,) = rng.choices(TERMS, TERM_WEIGHTS)
    return tuple(rng.randint(1, LARGEST_TERM) for _ in range(count))


def question(terms: Sequence[int]) -> str:
    return "+".join(map(str, terms)) + "="


def slipped_sum(left: int, right: int, slips: Slips, rng: random.Random) -> int:
    """`left + right`, or what somebody careless writes."""
    total = left + right
    if left % 10 + right % 10 >= 10 and rng.random() < slips.dropped_carry:
        total -= 10
    if rng.random() < slips.wrong_digit:
        total += rng.choice((-1, 1))
    return total


def solution(terms: Sequence[int], slips: Slips | None = None, rng: random.Random | None = None) -> str:
    """The working and the answer: `17+25=42;42+8=50;#50`. Without `slips`, the right one."""
    running, steps = terms[0], []
    for position, term in enumerate(terms[1:]):
        if slips and rng and position and rng.random() < slips.skipped_term:
            continue
        total = slipped_sum(running, term, slips, rng) if slips and rng else running + term
        steps.append(f"{running}+{term}={total};")
        running = total
    return "".join(steps) + f"#{running}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character (printable ASCII and newline), and the special ones."""
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
        tie_word_embeddings=False,
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


Demonstration = tuple[list[int], list[int]]
"""Token ids, and the labels: the same ids where they are the response, `IGNORED` before."""


def demonstrations(
    tokenizer: PreTrainedTokenizerFast, held_out: set[str], slips: Slips, rng: random.Random
) -> Iterator[Demonstration]:
    """Endless. A held-out prompt never comes up."""
    while True:
        terms = draw_terms(rng)
        asked = question(terms)
        if asked in held_out:
            continue
        prompt = prompt_ids(tokenizer, asked)
        response = tokenizer.encode(solution(terms, slips, rng) + EOS, add_special_tokens=False)
        yield prompt + response, [IGNORED] * len(prompt) + response


def batches(source: Iterator[Demonstration], tokens: int, rng: random.Random) -> Iterator[list[Demonstration]]:
    """Batches of alike lengths, of at most `tokens` tokens with the padding."""
    while True:
        pool = sorted((next(source) for _ in range(2048)), key=lambda demonstration: len(demonstration[0]))
        cut: list[list[Demonstration]] = [[]]
        for demonstration in pool:
            if (len(cut[-1]) + 1) * len(demonstration[0]) > tokens:
                cut.append([])
            cut[-1].append(demonstration)
        rng.shuffle(cut)
        yield from cut


def loss_of(model: LlamaForCausalLM, batch: list[Demonstration], pad: int) -> torch.Tensor:
    """Mean cross-entropy over the response tokens of the batch."""
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row, _ in batch])
    labels = torch.tensor([row + [IGNORED] * (longest - len(row)) for _, row in batch])
    # Padding is on the right, so causal attention keeps it out of every position that has a loss.
    logits = model(input_ids=ids).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up, then linear decay to a tenth."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.lr * (1 - 0.9 * done)


def pretrain(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings, held_out: set[str]
) -> None:
    rng = random.Random(f"{settings.seed}/demonstrations")
    source = demonstrations(tokenizer, held_out, settings.slips, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01)
    started, smooth = time.monotonic(), None
    model.train()
    for step, batch in zip(range(settings.steps), batches(source, settings.tokens_per_step, rng), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        loss = loss_of(model, batch, tokenizer.pad_token_id)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
        if (step + 1) % 50 == 0:
            elapsed = time.monotonic() - started
            log.info("step %d/%d  loss %.3f  %.0f s", step + 1, settings.steps, smooth, elapsed)


@torch.inference_mode()
def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[dict[str, Any]], sample: bool
) -> float:
    """Share of right final answers, greedy or sampled at temperature 1."""
    model.eval()
    tokenizer.padding_side = "left"
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    generated = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=192,
        do_sample=sample,
        top_k=0,
    )
    texts = tokenizer.batch_decode(generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [row["reward_model"]["ground_truth"] for row in rows]
    right = [text.rpartition("#")[2] == answer for text, answer in zip(texts, answers, strict=True)]
    return sum(right) / len(right)


def data_row(terms: Sequence[int], index: int, split: str) -> dict[str, Any]:
    """A row with verl's fields."""
    return {
        "prompt": [{"role": "user", "content": question(terms)}],
        "data_source": "asyncrl/chain_sum",
        "reward_model": {"style": "rule", "ground_truth": str(sum(terms))},
        "extra_info": {"index": index, "split": split},
    }


def draw_rows(settings: Settings) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and validation rows; no prompt is drawn twice."""
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
    """Draw the rows, pre-train, measure, write everything to `out`."""
    torch.set_num_threads(1)  # one thread: the sums come out in the same order on every run
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
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of data, weights and batches")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="pre-training steps")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    make(arguments.out, Settings(seed=arguments.seed, steps=arguments.steps))


if __name__ == "__main__":
    main()
