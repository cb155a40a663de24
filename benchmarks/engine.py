"""What the engine promises when memory is short, tenants are unequal and adapters are many.

    python benchmarks/engine.py [--only prefix,loads,adapters,fairness,alora,bytes] [--json]

The engine runs in this process, on the demo base and the native executor; adapters are random, of
rank 16 on all linears. Every figure is a ratio of two measurements of this run, which alternate:

- prefix: time to first token of a chat's second turn (1,024 tokens of it in the first turn), where
  the first turn was never seen over where it was
- loads: tokens per second of 8 running requests while 100 cold adapters load for requests of one
  token, over when nothing else comes; and the same where those adapters are resident already
- adapters: tokens per second of requests spread by Zipf's law over 1,000 adapters, with memory for
  16 of them, over those spread over 4; of rank 8, as in S-LoRA's own figure (Sheng et al., MLSys
  2024), and of rank 16, whose weights are large beside a base as small as the demo's
- fairness: tokens of a tenant that keeps 8 requests in flight beside one that keeps 80, over half
  of all; and the largest gap between what both were served, over the bound of virtual token
  counters (Sheng et al., OSDI 2024, theorem 4.4)
- alora: time to first token of a plain adapter over that of an activated one, asked about a
  conversation of 2,000 tokens that the base has had
- bytes: memory that an adapter takes over its image's bytes, the worst of three shapes; a fourth,
  of rank 4, is apart, since ranks are padded to eight

Prints a table and, as its last line, one JSON object; with `--json` only that.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

from bench import prepare_demo_base
from in_process import MODEL_LEN, Images, Served

from loraplex.engine.protocol import Service

Figures = dict[str, float]
Rates = list[tuple[int, float]]  # tokens and seconds of each window
TRIALS = 5
SHARED, ANSWER, QUESTION = 1024, 16, 32  # tokens of a first turn, its answer, a second turn
RUNNING, COLD, WINDOW = 8, 100, 10  # requests that decode; adapters in all, and in a window
TURNS, RANKS = 3, (8, 16)  # of the traffic
TRAFFIC, FEW, MANY, RESIDENT = 64, 4, 1000, 16  # requests, adapters, those that fit
PROMPT, REPLY = 64, 48  # tokens of a request of the traffic
VICTIM, FLOOD, SLOTS, FAIR_STEPS = 8, 80, 8, 500
LONGEST = 112, 56  # tokens of a prompt and of its reply, drawn evenly from an eighth of these on
INPUT_COST, OUTPUT_COST = 1.0, 2.0  # of a token in a virtual token counter
CONVERSATION, INVOCATION = 2000, (3_001, 3_002, 3_003)


def prefix(images: Images) -> Figures:
    """Second turns of chats, seen and unseen."""
    cold, warm, cached = [], [], []
    with closing(Served(images, kv_tokens=1 << 15)) as served:
        served.first_token_s(served.prompt(SHARED))
        for _ in range(TRIALS):
            first = served.prompt(SHARED)
            asked = served.send(first, ANSWER)
            served.run(asked)
            second = (*first, *served.tokens[asked], *served.prompt(QUESTION))
            warm.append(served.first_token_s(second))
            cached.append(served.last.cached_tokens)
            cold.append(served.first_token_s(served.prompt(len(second))))
    return {
        "prefix_ttft_speedup": ratio(cold, warm),
        "prefix_ttft_cold_ms": statistics.median(cold) * 1e3,
        "prefix_ttft_warm_ms": statistics.median(warm) * 1e3,
        "prefix_cached_tokens": min(cached),
    }


def loads(images: Images) -> Figures:
    """Decoding in windows: `WINDOW` cold adapters load, nothing comes, or only what is resident."""
    digests = images.adapters(RUNNING + 2 * WINDOW + COLD)
    own, warm, cold = digests[:RUNNING], digests[RUNNING : RUNNING + WINDOW], digests[-COLD:]
    cold_rates: Rates = []
    quiet_rates: Rates = []
    warm_rates: Rates = []
    room = (RUNNING + 2 * WINDOW) * images.memory(own[0])
    with closing(Served(images, kv_tokens=1 << 15, image_bytes=room)) as served:
        for image in digests[RUNNING:-COLD]:  # all memory is written once before it is timed
            served.first_token_s(served.prompt(1), image)
        for image in warm:
            served.engine.pin(image, True)
        running = [served.send(served.prompt(PROMPT), 1 << 11, image) for image in own]
        while not all(served.times[name] for name in running):
            served.step()
        for start in range(0, COLD, WINDOW):
            with _counted(served, running, cold_rates):
                steps = _load(served, cold[start : start + WINDOW])
            with _counted(served, running, quiet_rates):
                _spread(served, steps, [])
            with _counted(served, running, warm_rates):
                _spread(served, steps, warm)
    quiet = _rate(quiet_rates)
    return {
        "decode_during_cold_loads": _rate(cold_rates) / quiet,
        "decode_during_warm_requests": _rate(warm_rates) / quiet,
        "decode_quiet_tokens_per_s": quiet,
        "cold_loads_per_s": COLD / sum(seconds for _, seconds in cold_rates),
    }


def _load(served: Served, cold: list[str]) -> int:
    """Ask for a token of each cold adapter at once; returns the steps until all have come."""
    names, steps = {served.send(served.prompt(1), 1, image) for image in cold}, 0
    while not names <= served.finished.keys():
        served.step()
        steps += 1
    return steps


def _spread(served: Served, steps: int, images: list[str]) -> None:
    """Run so many steps, and ask for a token of each image, evenly over them."""
    for step in range(steps):
        for image in images[len(images) * step // steps : len(images) * (step + 1) // steps]:
            served.send(served.prompt(1), 1, image)
        served.step()


@contextmanager
def _counted(served: Served, running: list[str], rates: Rates) -> Iterator[None]:
    """Note how many tokens the running requests have had in the block, and its seconds."""
    before, began = sum(len(served.times[name]) for name in running), time.perf_counter()
    yield
    tokens = sum(len(served.times[name]) for name in running) - before
    rates.append((tokens, time.perf_counter() - began))


def _rate(rates: Rates) -> float:
    return sum(tokens for tokens, _ in rates) / sum(seconds for _, seconds in rates)


def adapters(images: Images) -> Figures:
    """The same traffic over few adapters and over many, the most popular resident at first."""
    drawn = {count: _zipf(count) for count in (FEW, MANY)}
    rates: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for _ in range(TURNS):
        for rank in RANKS:
            for count, ranks in drawn.items():
                rates[rank, count].append(_traffic(images, rank, ranks))
    of = {key: statistics.median(found) for key, found in rates.items()}
    first, second = (of[rank, MANY] / of[rank, FEW] for rank in RANKS)
    return {
        "throughput_1000_over_4": first,
        "throughput_1000_over_4_rank_16": second,
        "throughput_4_tokens_per_s": of[RANKS[0], FEW],
        "throughput_distinct_adapters": len({*drawn[MANY]}),
    }


def _traffic(images: Images, rank: int, drawn: list[int]) -> float:
    """Tokens per second of requests to adapters, of which `RESIDENT` fit."""
    names = dict(zip(dict.fromkeys(drawn), images.adapters(len({*drawn}), rank), strict=True))
    room = RESIDENT * images.memory(names[drawn[0]])
    with closing(Served(images, kv_tokens=1 << 15, image_bytes=room)) as served:
        for each in sorted(names)[:RESIDENT]:
            served.first_token_s(served.prompt(1), names[each])
        return _serve(served, [names[each] for each in drawn])


def _zipf(count: int) -> list[int]:
    """Which of `count` adapters each request of the traffic asks for."""
    weights = [1 / rank for rank in range(1, count + 1)]
    return Random(0).choices(range(count), weights, k=TRAFFIC)


def _serve(served: Served, images: list[str]) -> float:
    """Keep two requests a sequence in flight until all are served; tokens per second."""
    began, waiting, ended = time.perf_counter(), iter(images), 0
    for image in itertools.islice(waiting, 2 * served.settings.max_num_seqs):
        served.send(served.prompt(PROMPT), REPLY, image)
    while ended < len(images):
        for _ in served.step():
            ended += 1
            if (image := next(waiting, None)) is not None:
                served.send(served.prompt(PROMPT), REPLY, image)
    return len(images) * (PROMPT + REPLY) / (time.perf_counter() - began)


def fairness(images: Images) -> Figures:
    """Two tenants, always backlogged, one with ten times the requests of the other."""
    gaps, before, random = [], {}, Random(0)
    with closing(Served(images, kv_tokens=1 << 14, max_num_seqs=SLOTS)) as served:
        owner = {}

        def send(tenant: str) -> None:
            prompt, reply = (random.randint(most // 8, most) for most in LONGEST)
            owner[served.send(served.prompt(prompt), reply, tenant=tenant)] = tenant

        for tenant, count in (("flood", FLOOD), ("victim", VICTIM)):
            for _ in range(count):
                send(tenant)
        for step in range(FAIR_STEPS):
            for name in served.step():
                send(owner[name])
            tenants = {service.tenant: service for service in served.engine.stats().tenants}
            if step == FAIR_STEPS // 10:
                before = {name: tenants[name].generated_tokens for name in tenants}
            if len(tenants) == 2:
                cost = {name: _cost(tenants[name]) for name in tenants}
                gaps.append(cost["flood"] - cost["victim"])
    tokens = Counter({n: s.generated_tokens - before[n] for n, s in tenants.items()})
    bound = 2 * max(INPUT_COST * LONGEST[0], OUTPUT_COST * SLOTS * sum(LONGEST))
    return {
        "victim_share": tokens["victim"] / (tokens.total() / 2),
        "vtc_gap_over_bound": (max(gaps) - min(gaps)) / bound,
    }


def _cost(service: Service) -> float:
    return INPUT_COST * service.prompt_tokens + OUTPUT_COST * service.generated_tokens


def alora(images: Images) -> Figures:
    """A conversation with the base, then a question to an adapter about all of it."""
    plain, activated = [], []
    lora, other = images.adapters(1)[0], images.compile(alora_invocation_tokens=[*INVOCATION])
    room = 2 * max(images.memory(digest) for digest in (lora, other))
    with closing(Served(images, kv_tokens=1 << 15, image_bytes=room)) as served:
        for image in (lora, other):
            served.first_token_s(served.prompt(PROMPT), image)
        for _ in range(TRIALS):
            talk = served.prompt(CONVERSATION)
            asked = served.send(talk, ANSWER)
            served.run(asked)
            talk = (*talk, *served.tokens[asked], *INVOCATION)
            activated.append(served.first_token_s(talk, other))
            plain.append(served.first_token_s(talk, lora))
    return {
        "alora_ttft_speedup": ratio(plain, activated),
        "alora_ttft_ms": statistics.median(activated) * 1e3,
    }


def bytes_held(images: Images) -> Figures:
    """What adapters take of the region that they share with KV blocks."""
    attention, figures = ["q_proj", "v_proj"], {}
    shapes = {
        "rank_16_all": images.adapters(1)[0],
        "rank_8_q_v": images.compile(8, target_modules=attention),
        "rank_64_q_v": images.compile(64, target_modules=attention),
        "rank_4_all": images.compile(4),
    }
    room = sum(2 * images.memory(digest) for digest in shapes.values())
    with closing(Served(images, kv_tokens=MODEL_LEN, image_bytes=room)) as served:
        for shape, digest in shapes.items():
            before = served.residency.resident_bytes
            served.first_token_s(served.prompt(PROMPT), digest)
            held = served.residency.resident_bytes - before
            figures[f"bytes_{shape}"] = held / images.header(digest).block_bytes
    worst = max(figures[f"bytes_{shape}"] for shape in list(shapes)[:-1])
    return {"resident_bytes_over_image_bytes": worst, **figures}


def ratio(over: list[float], under: list[float]) -> float:
    """Of medians."""
    return statistics.median(over) / statistics.median(under)


SECTIONS: dict[str, Callable[[Images], Figures]] = {
    "prefix": prefix,
    "loads": loads,
    "adapters": adapters,
    "fairness": fairness,
    "alora": alora,
    "bytes": bytes_held,
}
GOALS = {  # what the figure is to be at least, or at most where it is to be low
    "prefix_ttft_speedup": (">=", 5.0),
    "decode_during_cold_loads": (">=", 0.9),
    "throughput_1000_over_4": (">=", 0.9),
    "victim_share": (">=", 0.9),
    "vtc_gap_over_bound": ("<=", 1.0),
    "alora_ttft_speedup": (">=", 10.0),
    "resident_bytes_over_image_bytes": ("<=", 1.02),
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the engine's promises.")
    parser.add_argument("--base", type=Path, help="a base.json; by default the demo base's")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by commas")
    parser.add_argument("--json", action="store_true", help="print the last line alone")
    options = parser.parse_args()
    if unknown := {*options.only.split(",")} - {*SECTIONS}:
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    base_file = options.base or prepare_demo_base()
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as folder:
        images = Images(base_file.absolute(), Path(folder))
        for name in options.only.split(","):
            began = time.perf_counter()
            found = SECTIONS[name](images)
            figures |= found
            if not options.json:
                print_figures(name, found, time.perf_counter() - began)
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


def print_figures(section: str, figures: Figures, seconds: float) -> None:
    """Print a section's lines, each figure beside its goal."""
    print(f"{section}, {seconds:.0f} s", flush=True)
    for name, value in figures.items():
        goal = " ".join(map(str, GOALS.get(name, ())))
        print(f"  {name:34} {value:10.3f}  {goal}", flush=True)


if __name__ == "__main__":
    main()
