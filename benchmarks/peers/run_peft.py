"""Transformers and PEFT as a peer: `generate` on one padded batch, an adapter name for each row."""

import time
from collections.abc import Callable

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from wire import Facts, Setup, Times, Work, best_dtype, serve, versions


class Clock(StoppingCriteria):
    """Notes when each step ends, and stops nothing."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def __call__(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Stop no row."""
        self.moments.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def start(setup: Setup) -> tuple[Facts, Callable[[Work], Times]]:
    """Load the base and all adapters; without any, nothing of PEFT's is between the linears."""
    torch.set_num_threads(setup.threads)
    dtype = best_dtype(setup.dtype)
    base = AutoModelForCausalLM.from_pretrained(setup.model, dtype=getattr(torch, dtype))
    names = [f"adapter-{i}" for i in range(len(setup.adapters))]
    model = base
    if names:
        model = PeftModel.from_pretrained(base, setup.adapters[0], adapter_name=names[0])
        for name, path in zip(names[1:], setup.adapters[1:], strict=True):
            model.load_adapter(path, adapter_name=name)
    model.eval()

    @torch.inference_mode()
    def run(work: Work) -> Times:
        options: dict[str, object] = {}
        if work.adapters == 1:
            model.set_adapter(names[0])
        elif work.adapters:
            options["adapter_names"] = [names[i] for i in work.adapters_of_rows()]
        clock, started = Clock(), time.perf_counter()
        prompts = torch.tensor(work.prompts)
        model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=work.tokens,
            do_sample=False,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([clock]),
            **options,
        )
        return [[moment - started for moment in clock.moments]] * len(work.prompts)

    return {**versions(["torch", "transformers", "peft"]), "dtype": dtype}, run


if __name__ == "__main__":
    serve(start)
