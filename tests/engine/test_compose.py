"""Compositions: the sum of the parts' deltas, as PEFT's "cat"; and what cannot be composed."""

import runpy
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.engine.compile_adapter import compile_adapter
from loraplex.engine.compose import MAX_PARTS, Component, CompositionError, compose, merge
from loraplex.engine.image_builder import ImageBuilder, SliceData
from loraplex.engine.image_fetcher import Failure, ImageFetcher, Located
from loraplex.engine.image_places import State
from loraplex.engine.images import BaseManifest, ImageError, ImageHeader, ImageStore, read_image
from loraplex.engine.protocol import Part, composition_digest

KIT = runpy.run_path(str(Path(__file__).with_name("residency_kit.py")))
KIB, House, damage = itemgetter("KIB", "House", "damage")(KIT)

OUTS = {"qkv": (10, 6, 6), "o": (12,), "down": (12,)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
IN = 12

Deltas = dict[tuple[int, str, int], tuple[np.ndarray, np.ndarray]]


def draw(random: np.random.Generator, dtype: str, *shape: int) -> bytes:
    """Integers, which every dtype has."""
    values = torch.from_numpy(random.integers(-100, 100, shape)).to(DTYPES[dtype])
    return values.view(torch.uint8).numpy().tobytes() if values.numel() else b""


def image(
    folder: Path, seed: int, dtype: str = "fp32", names: str = "qkv o", base: str = "b", **rows: Any
) -> Component:
    """Write an image of odd ranks, with biases in its even slices; `rows` are for all slices."""
    random = np.random.default_rng(seed)
    builder = ImageBuilder(base * 64, dtype, rows.pop("invocation", ()))
    outs = rows.pop("outs", OUTS)
    for name in names.split():
        ranks = [int(random.integers(0, 4)) for _ in outs[name]]
        slices = [
            SliceData(
                rank,
                out,
                draw(random, dtype, rank, out),
                bias=None if i % 2 else random.normal(size=out).astype(np.float32).tobytes(),
                **rows,
            )
            for i, (rank, out) in enumerate(zip(ranks, outs[name], strict=True))
        ]
        a = draw(random, dtype, sum(ranks), IN)
        scale = random.normal(size=sum(ranks)).astype(np.float32).tobytes()
        builder.add(seed // 2, name, IN, a, scale, slices)
    path = folder / "image"
    digest = builder.finish(path)
    path = path.rename(folder / digest)
    return Component(digest, 1.0, read_image(path, digest)[0])


def block(folder: Path, component: Component) -> bytearray:
    return read_image(folder / component.digest, component.digest)[1]


def deltas(header: ImageHeader, content: bytearray) -> Deltas:
    """What each slice adds: a matrix `[out, in]` and a bias."""

    def read(offset: int, dtype: torch.dtype, *shape: int) -> np.ndarray:
        count = int(np.prod(shape))
        if not count:
            return np.zeros(shape)
        flat = torch.frombuffer(content, dtype=dtype, count=count, offset=offset)
        return flat.double().numpy().reshape(shape)

    found, kind = {}, DTYPES[header.dtype]
    for entry in header.entries:
        total = sum(part.rank for part in entry.slices)
        a = read(entry.a, kind, total, entry.in_features)
        a *= read(entry.scale, torch.float32, total)[:, None]
        row = 0
        for i, part in enumerate(entry.slices):
            out = part.out_features
            b = read(part.b, kind, part.rank, out)
            bias = read(part.bias, torch.float32, out) if part.bias >= 0 else np.zeros(out)
            found[entry.layer, entry.projection, i] = b.T @ a[row : row + part.rank], bias
            row += part.rank
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_delta_is_the_weighted_sum(tmp_path: Path, dtype: str) -> None:
    weights, names = (0.5, -2.0, 1.25), ("qkv o", "o down", "qkv")
    parts = [
        image(tmp_path, seed, dtype, names[seed])._replace(weight=weights[seed])
        for seed in range(3)
    ]
    blocks = [block(tmp_path, part) for part in parts]
    expected: dict[tuple[int, str, int], list[np.ndarray]] = {}
    for part, content in zip(parts, blocks, strict=True):
        for key, (delta, bias) in deltas(part.header, content).items():
            total = expected.setdefault(key, [np.zeros_like(delta), np.zeros_like(bias)])
            total[0] += part.weight * delta
            total[1] += part.weight * bias
    header, content = compose(parts, blocks)
    assert header.block_bytes == len(content)
    found = deltas(header, content)
    assert found.keys() == expected.keys()
    for key, (delta, bias) in found.items():
        np.testing.assert_allclose(delta, expected[key][0], rtol=1e-5, atol=1e-3)
        np.testing.assert_allclose(bias, expected[key][1], rtol=1e-5, atol=1e-6)


def test_one_part_of_weight_one_is_the_image_itself(tmp_path: Path) -> None:
    part = image(tmp_path, 1, names="o qkv")
    content = block(tmp_path, part)
    assert compose([part], [content]) == (part.header, content)


WRONG: dict[str, tuple[dict[str, Any], float, str]] = {
    "another base": ({"base": "c"}, 1.0, "another base"),
    "another dtype": ({"dtype": "bf16"}, 1.0, "dtype is bf16, another part's fp32"),
    "DoRA": ({"names": "o", "gain": np.ones(12, np.float32).tobytes()}, 1.0, "DoRA"),
    "activated": ({"invocation": (3, 4)}, 1.0, "activated"),
    "another size": ({"outs": {"qkv": (10, 6, 4), "o": (12,)}}, 1.0, "sizes"),
    "no number": ({}, float("nan"), "weight is nan"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_composed_is_named(tmp_path: Path, case: str) -> None:
    options, weight, message = WRONG[case]
    good, bad = image(tmp_path, 0), image(tmp_path, 1, **options)._replace(weight=weight)
    with pytest.raises(CompositionError, match=message) as raised:
        compose([good, bad], [block(tmp_path, good), block(tmp_path, bad)])
    assert bad.digest[:12] in str(raised.value)


def test_weights_that_overflow_are_refused(tmp_path: Path) -> None:
    part = image(tmp_path, 1)._replace(weight=1e300)
    with pytest.raises(CompositionError, match="too large"):
        compose([part], [block(tmp_path, part)])


def test_a_header_that_points_outside_its_block_is_refused(tmp_path: Path) -> None:
    part = image(tmp_path, 1)
    with pytest.raises(ImageError, match="outside its block"):
        compose([part], [block(tmp_path, part)[:-200]])


def test_parts_are_merged_and_ordered() -> None:
    parts = [Part("b", 1.0), Part("a", 2.0), Part("b", 0.5)]
    assert merge(parts) == merge(reversed(parts)) == [Part("a", 2.0), Part("b", 1.5)]
    with pytest.raises(CompositionError, match="too many"):
        merge(Part(str(number), 1.0) for number in range(MAX_PARTS + 1))


def put(house: Any, seed: int) -> str:
    digest = image(house.folder, seed).digest
    house.store.put(house.folder / digest, digest)
    return digest


def composition(*parts: tuple[str, float]) -> tuple[str, str, tuple[Part, ...]]:
    """Arguments of `acquire`."""
    found = tuple(Part(*part) for part in parts)
    return composition_digest(found), "tenant", found


def test_a_composition_is_resident_as_one_image(tmp_path: Path) -> None:
    house = House(tmp_path, 20 * KIB)
    a, b = put(house, 0), put(house, 1)
    wanted = composition((a, 0.5), (b, 2.0))
    house.residency.acquire(*wanted)
    house.residency.acquire(composition_digest(wanted[2][::-1]))
    house.settle()
    assert house.residency.references(wanted[0]) == 2
    assert house.states(wanted[0], a, b) == [State.DEVICE, State.ABSENT, State.ABSENT]
    header = house.residency.header(wanted[0])
    assert house.residency.resident_bytes == header.block_bytes == house.device.bytes
    house.acquire(a)
    assert house.states(a) == [State.DEVICE], "a part is an image as before"


SPOIL: dict[str, tuple[Callable[[Any, str], Any], str]] = {
    "missing": (lambda house, digest: house.store.delete(digest), "image_missing"),
    "damaged": (lambda house, digest: damage(house.path(digest)), "image_corrupt"),
}


@pytest.mark.parametrize("fault", SPOIL)
def test_a_bad_part_fails_what_it_is_part_of(tmp_path: Path, fault: str) -> None:
    house = House(tmp_path, 20 * KIB)
    good, bad = put(house, 0), put(house, 1)
    spoil, code = SPOIL[fault]
    spoil(house, bad)
    wanted = composition((good, 1.0), (bad, 1.0))
    house.residency.acquire(*wanted)
    house.acquire(good)
    failure = house.residency.failure(wanted[0])
    assert failure is not None
    assert failure.code == code
    assert bad[:12] in failure.message
    assert house.states(good) == [State.DEVICE]


def test_what_cannot_be_composed_is_the_request_s_fault(tmp_path: Path) -> None:
    house = House(tmp_path, 20 * KIB)
    wanted = composition((put(house, 0), 1.0), (put(house, 1), float("inf")))
    house.residency.acquire(*wanted)
    house.residency.poll()
    house.settle()
    failure = house.residency.failure(wanted[0])
    assert failure is not None
    assert failure.code == "invalid_request"


def test_wrong_parts_do_not_spoil_a_composition_for_others(tmp_path: Path) -> None:
    house = House(tmp_path, 20 * KIB)
    a, b = put(house, 0), put(house, 1)
    digest, tenant, parts = composition((a, 0.5), (b, 2.0))
    house.residency.acquire(digest, tenant, (Part(a, 1.0),))
    house.acquire(digest)
    failure = house.residency.failure(digest)
    assert failure is not None
    house.residency.acquire(digest, tenant, parts)
    house.residency.poll()
    house.settle()
    assert house.states(digest) == [State.DEVICE]
    assert house.residency.failure(digest) is None


def test_right_parts_that_come_while_wrong_ones_are_tried_are_tried_next(tmp_path: Path) -> None:
    house = House(tmp_path, 20 * KIB)
    digest, tenant, parts = composition((put(house, 0), 0.5))
    house.residency.acquire(digest)
    house.residency.acquire(digest, tenant, parts)
    house.settle()
    assert house.states(digest) == [State.DEVICE]


SIZES = {
    "q_proj": (64, 64), "k_proj": (64, 32), "v_proj": (64, 32), "o_proj": (64, 64),
    "gate_proj": (64, 96), "up_proj": (64, 96), "down_proj": (96, 64),
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "narrow": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "wide": {"r": 5, "use_rslora": True, "target_modules": [*SIZES]},
}
WEIGHTS = {"narrow": 0.75, "wide": -0.5}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_logits_are_those_of_peft(tmp_path: Path, torch_kit: ModuleType) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    base = BaseManifest("tiny", "", "f" * 64, 2, 64, 61, 128, (2,), SIZES)
    for name, settings in ADAPTERS.items():
        lora = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
        if isinstance(model, peft.PeftModel):
            model.add_adapter(name, lora)
        else:
            model = peft.get_peft_model(model, lora, name)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)

    store, parts = ImageStore(str(tmp_path / "store")), []
    for name, weight in WEIGHTS.items():
        digest = compile_adapter(tmp_path / name, base, tmp_path / "image", "fp32").digest
        store.put(tmp_path / "image", digest)
        parts.append(Part(digest, weight))
    runner = torch_kit.Runner(torch_kit.load(tmp_path / "base"))
    executor, wanted = runner.executor, composition_digest(parts)
    fetcher = ImageFetcher(
        store, tmp_path / "cache", base.fingerprint, limit_bytes=1 << 30,
        prepare=executor.prepare_image, measure=executor.image_bytes,
    )  # fmt: skip
    located = fetcher.locate(wanted, tuple(parts))
    assert isinstance(located, Located)
    loaded = fetcher.read(wanted, located)
    assert not isinstance(loaded, Failure)
    executor.add_image(wanted, loaded.prepared)

    ids = torch.randint(0, 61, (40,)).tolist()
    model.add_weighted_adapter([*WEIGHTS], [*WEIGHTS.values()], "sum", combination_type="cat")
    model.set_adapter("sum")
    with torch.inference_mode():
        expected = model.eval()(torch.tensor([ids])).logits[0]
    found = runner.logits(ids, wanted)
    assert (found - expected).abs().max() <= 1e-4
    assert (found - runner.logits(ids)).abs().max() > 0.1
