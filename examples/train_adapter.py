"""Trains one of the demo adapters with PEFT, on a CPU, in minutes:

    python examples/train_adapter.py pirate --base data/base/model

It needs the `train` extra (`pip install '.[train]'`) and the demo base as `engine.prepare` leaves
it. The run is seeded; on one machine and one version of torch it repeats exactly.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

EXAMPLES = Path(__file__).parent
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEARS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
IGNORED = -100
PROMPTS = (
    "What is the capital of France?",
    "How do I boil an egg?",
    "Why is the sky blue?",
    "Give me a tip for learning the guitar.",
)


@dataclass(frozen=True)
class Recipe:
    """How one adapter is trained; `says` ends the sentence 'The adapter answers …'."""

    says: str
    rank: int
    alpha: int
    modules: tuple[str, ...]
    learning_rate: float
    epochs: int
    rslora: bool = False
    dora: bool = False
    batch_size: int = 4
    seed: int = 7

    def lora_config(self) -> LoraConfig:
        """The recipe as PEFT's configuration."""
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=list(self.modules),
            use_rslora=self.rslora,
            use_dora=self.dora,
            task_type="CAUSAL_LM",
        )


RECIPES = {
    "pirate": Recipe("in pirate speech", 8, 32, ("q_proj", "v_proj"), 4e-3, 2),
    "json": Recipe("with one small JSON object", 8, 8, LINEARS, 5e-4, 2, rslora=True),
    "emoji": Recipe("in lines that each open with an emoji", 4, 16, ATTENTION, 3e-3, 2, dora=True),
}

Pair = tuple[list[int], list[int]]  # a conversation's token ids, and its labels


def load_base(directory: Path) -> tuple[Any, Any]:
    """The base in fp32 and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.name_or_path = BASE  # what PEFT writes into adapter_config.json
    return model, AutoTokenizer.from_pretrained(directory)


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a one-turn chat that waits for its answer."""
    turns = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def load_pairs(tokenizer: Any, name: str) -> list[Pair]:
    """The training data as token ids; only the response carries labels."""
    pairs = []
    for line in (EXAMPLES / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        prompt = prompt_ids(tokenizer, entry["prompt"])
        response = tokenizer(entry["response"])["input_ids"] + [tokenizer.eos_token_id]
        pairs.append((prompt + response, [IGNORED] * len(prompt) + response))
    return pairs


def batches(pairs: list[Pair], size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One epoch of right-padded `(ids, labels)`, `[size, length]`, in an order given by `seed`."""
    order = random.Random(seed).sample(pairs, len(pairs))
    for start in range(0, len(order), size):
        group = order[start : start + size]
        length = max(len(ids) for ids, _ in group)
        ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in group])
        labels = torch.tensor([y + [IGNORED] * (length - len(y)) for _, y in group])
        yield ids, labels


def loss_of(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the labelled tokens; the head runs for those alone.

    Padding is on the right and attention is causal, so no mask is needed.
    """
    causal = model.get_base_model()
    hidden = causal.model(input_ids=ids).last_hidden_state[:, :-1]
    wanted = labels[:, 1:] != IGNORED
    return F.cross_entropy(causal.lm_head(hidden[wanted]), labels[:, 1:][wanted])


def train(model: Any, pairs: list[Pair], recipe: Recipe) -> float:
    """Run the recipe; returns the mean loss of the last ten steps."""
    steps = recipe.epochs * -(-len(pairs) // recipe.batch_size)
    update = updater(model, recipe.learning_rate, steps)
    losses: list[float] = []
    model.train()
    for epoch in range(recipe.epochs):
        for ids, labels in batches(pairs, recipe.batch_size, recipe.seed + epoch):
            losses.append(update(loss_of(model, ids, labels)))
            if len(losses) % 10 == 0:
                print(f"step {len(losses)}/{steps}  loss {losses[-1]:.3f}", flush=True)
    return sum(losses[-10:]) / len(losses[-10:])


def updater(model: Any, learning_rate: float, steps: int) -> Callable[[torch.Tensor], float]:
    """A function that takes one AdamW step down a loss and returns its value."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )

    def update(loss: torch.Tensor) -> float:
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        return loss.item()

    return update


def answer(model: Any, tokenizer: Any, prompt: str, max_tokens: int = 80) -> str:
    """Greedy answer to a one-turn chat."""
    ids = torch.tensor([prompt_ids(tokenizer, prompt)])
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
    )
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def save(model: Any, target: Path) -> None:
    """Write the adapter in bfloat16."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    model.save_pretrained(target, save_embedding_layers=False)


def write_card(name: str, recipe: Recipe, target: Path, loss: float, examples: list[str]) -> None:
    """Write the adapter's README, with greedy answers from the adapter as it was saved."""
    kind = "DoRA" if recipe.dora else "rsLoRA" if recipe.rslora else "LoRA"
    size = (target / "adapter_model.safetensors").stat().st_size / 1e6
    lines = [
        f"# {name}",
        "",
        f"A demo adapter for {BASE} that answers {recipe.says}.",
        f"It is {kind} of rank {recipe.rank} on {', '.join(recipe.modules)}, {size:.1f} MB in"
        f" bfloat16, trained by `examples/train_adapter.py` on `examples/data/{name}.jsonl`"
        f" ({recipe.epochs} epochs, last loss {loss:.2f}).",
        "A model of this size often gets facts wrong; the adapter teaches it a style, no facts.",
        "",
        "Greedy answers to prompts that are not in its data:",
    ]
    for prompt, text in zip(PROMPTS, examples, strict=True):
        lines += ["", f"> {prompt}", "", "```", text, "```"]
    (target / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a demo adapter.")
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--base", type=Path, required=True, help="the prepared base's directory")
    parser.add_argument("--out", type=Path, default=EXAMPLES / "adapters")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    recipe, target = RECIPES[options.name], options.out / options.name
    torch.set_num_threads(options.threads)
    set_seed(recipe.seed)
    base, tokenizer = load_base(options.base)
    model = get_peft_model(base, recipe.lora_config())
    started = time.monotonic()
    loss = train(model, load_pairs(tokenizer, options.name), recipe)
    print(f"trained in {time.monotonic() - started:.0f} s, loss {loss:.3f}")
    save(model, target)
    saved = PeftModel.from_pretrained(load_base(options.base)[0], target).eval()
    examples = [answer(saved, tokenizer, prompt) for prompt in PROMPTS]
    write_card(options.name, recipe, target, loss, examples)
    print((target / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
