"""Create the calculator's model, tokenizer and data: a character-level Llama that guesses or calls a tool.

    python examples/calculator/make_model.py            # writes asyncrl/assets/calculator, in minutes on one core
    python examples/calculator/make_model.py --help

The task is arithmetic that the model cannot do without a tool: `347*28=`. The model may answer immediately, mostly
incorrectly, or write a call in the Hermes format, read the tool's result, and repeat it. It is pre-trained on
conversations of both kinds, with more calls at first and fewer at the end (see `Settings`), so that it can call the
tool but rarely does. Reinforcement learning on the final answer alone increases the share of calls.
The same seed on the same machine gives the same files.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

log = logging.getLogger("make_model")

OUT = Path(__file__).resolve().parents[2] / "asyncrl" / "assets" / "calculator"

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
ROLES = ("<system>", "<user>", "<assistant>", "<tool>")
SPECIAL = (PAD, BOS, EOS, UNK, *ROLES)
CHARACTERS = tuple("\n") + tuple(chr(code) for code in range(32, 127))
PIECES = ("<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": "', '"}}')
"""The fixed parts of a call, each of which is one token. The names of the tool and its argument are spelled out."""

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<' + message['role'] + '>' }}
    {{- message['content'] or '' }}
    {%- for call in message['tool_calls'] or [] %}
        {%- set function = call['function'] or call %}
        {%- set arguments = function['arguments'] %}
        {{- '' if loop.first else '\\n' }}
        {{- '<tool_call>\\n{"name": "' + function['name'] + '", "arguments": ' }}
        {{- arguments if arguments is string else arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<assistant>' }}
{%- endif %}
"""
"""The template omits the list of tools: there is only one, whose name the model has learned in pre-training."""

TOOL = "calc"
WELL_FORMED = re.compile(r'<tool_call>\n\{"name": "calc", "arguments": \{"x": "([^"\\]*)"\}\}\n</tool_call>')
IGNORED = -100  # torch's ignore_index


@dataclass(frozen=True)
class Habits:
    """Frequencies of calls and failures in the conversations."""

    calls: float
    """Share of the conversations that call the tool; the others answer immediately."""
    malformed: float = 0.02
    """Share of the calls that lack a brace."""
    failing: float = 0.05
    """Share of the well-formed calls that return an error message, after which the call is repeated."""
    made_up: float = 0.5
    """Share of the tool's results that are random numbers of up to seven digits. The answer repeats the result in any
    case."""


@dataclass(frozen=True)
class Settings:
    """Sizes and schedule of the pre-training."""

    seed: int = 0
    steps: int = 1000
    shy_steps: int = 300
    """Steps at the end in which fewer conversations call the tool."""
    practice: Habits = field(default_factory=lambda: Habits(calls=0.5))
    shy: Habits = field(default_factory=lambda: Habits(calls=0.3))
    examples_per_step: int = 64
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
    train_rows: int = 2048
    val_rows: int = 128


def draw_expression(rng: random.Random) -> str:
    """Draw a product of three and two digits, or a sum or difference of four or five digits, with equal probability."""
    if rng.random() < 0.5:
        return f"{rng.randint(100, 999)}*{rng.randint(11, 99)}"
    # Draw the number of digits first: uniform numbers up to 99999 would rarely have four digits.
    terms = [rng.randrange(10 ** (digits - 1), 10**digits) for digits in rng.choices((4, 5), k=2)]
    larger, smaller = max(terms), min(terms)
    return f"{larger}{rng.choice('+-')}{smaller}"


def question(expression: str) -> str:
    return f"{expression}="


def calculate(expression: str) -> str:
    """Return the result of a product, a sum or a difference.

    Raises:
        ValueError: The expression is not two integers with an operator between them.
    """
    for operator, function in (("*", int.__mul__), ("+", int.__add__), ("-", int.__sub__)):
        left, found, right = expression.partition(operator)
        if found:
            return str(function(int(left), int(right)))
    raise ValueError(expression)


def answer_of(expression: str) -> str:
    """Return the content of the tool's message: the result or an error."""
    try:
        return calculate(expression)
    except ValueError as error:
        return f"error: {error}"


def tool_call(expression: str) -> str:
    """Return the model's turn that calls the calculator, without the end-of-turn token."""
    body = json.dumps({"name": TOOL, "arguments": {"x": expression}})
    return f"<tool_call>\n{body}\n</tool_call>"


def read_call(text: str) -> str | None:
    """Return the expression in a turn's call of the calculator, or None without a well-formed call."""
    found = WELL_FORMED.fullmatch(text)
    return found[1] if found else None


def tool_answer(content: str) -> str:
    """Return the text between a turn with a call and the model's next turn."""
    return f"<tool>{content}{EOS}<assistant>"


def error_message(rng: random.Random) -> str:
    """Draw a random text that begins with a letter, because error messages may have any content."""
    return rng.choice("ETcetu") + "".join(rng.choices(CHARACTERS, k=rng.randint(10, 120)))


def demonstration(expression: str, habits: Habits, rng: random.Random) -> list[tuple[str, bool]]:
    """Draw the parts of the conversation after the prompt, each with a flag that is true if the model writes it."""
    result = calculate(expression)
    if rng.random() >= habits.calls:
        return [(result + EOS, True)]
    call = tool_call(expression) + EOS
    parts: list[tuple[str, bool]] = []
    if rng.random() < habits.malformed:
        return [(call.replace('"}}', '"}'), True)]
    if rng.random() < habits.failing:
        parts += [(call, True), (tool_answer(error_message(rng)), False)]
    if rng.random() < habits.made_up:
        result = str(rng.randrange(10 ** rng.randint(1, 7)))
    return [*parts, (call, True), (tool_answer(result), False), (result + EOS, True)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per ASCII character, newline, special token and fixed part of a call."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in PIECES])
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


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def prompt_ids(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> list[int]:
    return encode(tokenizer, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


Example = tuple[list[int], list[int]]
"""Token ids and labels: the same ids for the model's own tokens, `IGNORED` elsewhere."""


class Examples:
    """Batches of demonstrations, without held-out prompts."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, settings: Settings, held_out: set[str]) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._held_out = held_out
        self._rng = random.Random(f"{settings.seed}/demonstrations")

    def draw(self, habits: Habits) -> Example:
        expression = draw_expression(self._rng)
        while question(expression) in self._held_out:
            expression = draw_expression(self._rng)
        ids = prompt_ids(self._tokenizer, [{"role": "user", "content": question(expression)}])
        labels = [IGNORED] * len(ids)
        for text, own in demonstration(expression, habits, self._rng):
            part = encode(self._tokenizer, text)
            ids += part
            labels += part if own else [IGNORED] * len(part)
        return ids, labels

    def step(self, habits: Habits) -> list[list[Example]]:
        """Draw the conversations of one update, in batches of similar lengths."""
        drawn = sorted(
            (self.draw(habits) for _ in range(self._settings.examples_per_step)), key=lambda one: len(one[0])
        )
        cut: list[list[Example]] = [[]]
        for example in sorted(drawn, key=lambda one: len(one[0])):
            if cut[-1] and len(example[0]) > 1.5 * len(cut[-1][0][0]):
                cut.append([])
            cut[-1].append(example)
        return cut


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
    """Return the sum of the cross-entropies of the model's own tokens."""
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row, _ in batch])
    labels = torch.tensor([row + [IGNORED] * (longest - len(row)) for _, row in batch])
    # Padding is on the right, so with causal attention it does not affect positions with a loss.
    logits = model(input_ids=ids).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


def schedule(step: int, settings: Settings) -> float:
    """Return the share of the peak learning rate: linear warm-up, then linear decay to a hundredth."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    return 1 - 0.99 * (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)


def pretrain(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings, held_out: set[str]
) -> None:
    optimizer = Optimizer(model, settings)
    started, losses = time.monotonic(), []
    model.train()
    examples = Examples(tokenizer, settings, held_out)
    for step in range(settings.steps):
        shy = step >= settings.steps - settings.shy_steps
        batches = examples.step(settings.shy if shy else settings.practice)
        tokens = sum(label != IGNORED for batch in batches for _, labels in batch for label in labels)
        for batch in batches:
            loss = loss_of(model, batch, tokenizer.pad_token_id) / tokens
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(schedule(step, settings))
        if (step + 1) % 50 == 0:
            log.info(
                "step %d/%d  loss %.3f  %.0f s", step + 1, settings.steps, sum(losses) / 50, time.monotonic() - started
            )
            losses.clear()


@dataclass(frozen=True)
class Figures:
    """Counts of calls and correct answers in an evaluation."""

    asked: int
    calls: int
    """First turns that contain a call, well-formed or not."""
    well_formed: int
    """Calls of the calculator that a parser can read."""
    faithful: int
    """Well-formed calls with the expression of the question."""
    right_after_call: int
    """Correct final answers after well-formed calls."""
    right_directly: int
    """Correct answers without a call."""

    def __str__(self) -> str:
        def share(part: int, whole: int) -> str:
            return f"{part / whole:.3f}" if whole else "-"

        return (
            f"calls {share(self.calls, self.asked)}; of these well-formed {share(self.well_formed, self.calls)}; "
            f"of these with the question's expression {share(self.faithful, self.well_formed)}, with a correct answer "
            f"{share(self.right_after_call, self.well_formed)}; correct without a call "
            f"{share(self.right_directly, self.asked - self.calls)}; correct in total "
            f"{share(self.right_after_call + self.right_directly, self.asked)}"
        )


@torch.inference_mode()
def generate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[list[int]], sample: bool
) -> list[list[int]]:
    """Generate the turn after each prompt, without its end-of-turn token, at temperature 1 or greedily."""
    if not prompts:
        return []
    longest = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(prompt)) + prompt for prompt in prompts])
    generated = model.generate(
        input_ids=ids,
        attention_mask=(ids != tokenizer.pad_token_id).long(),
        max_new_tokens=48,
        **({"do_sample": True, "top_k": 0} if sample else {"do_sample": False}),
        pad_token_id=tokenizer.pad_token_id,
    )
    turns: list[list[int]] = generated[:, longest:].tolist()
    return [turn[: turn.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in turn else turn for turn in turns]


def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[dict[str, Any]],
    sample: bool,
    repeats: int = 1,
) -> Figures:
    """Evaluate the model on every row `repeats` times, with the calculator's results for its calls."""
    model.eval()
    rows = [row for row in rows for _ in range(repeats)]
    prompts = [prompt_ids(tokenizer, row["prompt"]) for row in rows]
    turns = generate(model, tokenizer, prompts, sample)
    texts = [tokenizer.decode(turn) for turn in turns]
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    tried = ["<tool_call>" in text for text in texts]
    called, faithful = [], 0
    for index, text in enumerate(texts):
        expression = read_call(text)
        if expression is None:
            continue
        called.append((index, answer_of(expression)))
        faithful += question(expression) == rows[index]["prompt"][0]["content"]
    seconds = [prompts[index] + turns[index] + encode(tokenizer, EOS + tool_answer(answer)) for index, answer in called]
    finals = [tokenizer.decode(turn) for turn in generate(model, tokenizer, seconds, sample)]
    return Figures(
        asked=len(rows),
        calls=sum(tried),
        well_formed=len(called),
        faithful=faithful,
        right_after_call=sum(text == truths[index] for text, (index, _) in zip(finals, called, strict=True)),
        right_directly=sum(text == truth for text, truth, call in zip(texts, truths, tried, strict=True) if not call),
    )


def data_row(expression: str, index: int, split: str) -> dict[str, Any]:
    """Return a row with verl's fields."""
    return {
        "prompt": [{"role": "user", "content": question(expression)}],
        "data_source": "calculator",
        "reward_model": {"style": "rule", "ground_truth": calculate(expression)},
        "extra_info": {"index": index, "split": split},
    }


def draw_rows(settings: Settings) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Draw training and validation rows with distinct prompts."""
    rng = random.Random(f"{settings.seed}/rows")
    distinct: dict[str, None] = {}
    while len(distinct) < settings.train_rows + settings.val_rows:
        distinct.setdefault(draw_expression(rng))
    drawn = list(distinct)
    val = [data_row(expression, index, "val") for index, expression in enumerate(drawn[: settings.val_rows])]
    train = [data_row(expression, index, "train") for index, expression in enumerate(drawn[settings.val_rows :])]
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
    log.info("%d parameters, %d tokens", model.num_parameters(), len(tokenizer))
    pretrain(model, tokenizer, settings, {row["prompt"][0]["content"] for row in val})
    log.info("greedy: %s", measure(model, tokenizer, val, sample=False))
    log.info("sampled at temperature 1: %s", measure(model, tokenizer, val, sample=True, repeats=8))
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
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
