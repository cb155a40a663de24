"""Random adapters for benchmarks: LoRA on all linears, through the real compiler.

    python benchmarks/adapters.py 8 --base build/demo-base/base.json --store build/bench-images

Knows PEFT's file format and the compiler's command line; refuses to know what is measured.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save_file

from loraplex.engine.images import BaseManifest, ImageStore

RANK = 16
BLOCK_OF = {"gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}
SCALE = 0.02  # small enough for finite logits, large enough to change them


def make_images(
    base_file: Path,
    store: ImageStore,
    count: int,
    folder: Path,
    *,
    rank: int = RANK,
    dtype: str = "bf16",
) -> list[str]:
    """Write `count` adapters, seeded by their number, into the store; returns their digests.

    `dtype` is that of the images.
    """
    base = msgspec.json.decode(base_file.read_bytes(), type=BaseManifest)
    digests = []
    for seed in range(count):
        source, image = folder / f"peft-{seed}", folder / f"{seed}.safetensors"
        write_peft(base, source, seed, rank)
        digest = compile_image(source, base_file, image, dtype)
        store.put(image, digest)
        digests.append(digest)
    return digests


def write_peft(
    base: BaseManifest, target: Path, seed: int, rank: int = RANK, **options: object
) -> None:
    """Write an adapter as PEFT does: a configuration, and A `[r, in]` and B `[out, r]` in fp32.

    `options` go into the configuration, such as other `target_modules` than all linears.
    """
    target.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(base.modules),
        **options,
    }
    (target / "adapter_config.json").write_text(json.dumps(config))
    random, tensors = np.random.default_rng(seed), {}
    for layer in range(base.num_layers):
        for module in config["target_modules"]:
            wide_in, wide_out = base.modules[module]
            block = BLOCK_OF.get(module, "self_attn")
            name = f"base_model.model.model.layers.{layer}.{block}.{module}"
            for part, shape in (("lora_A", (rank, wide_in)), ("lora_B", (wide_out, rank))):
                values = random.normal(0.0, SCALE, shape)
                tensors[f"{name}.{part}.weight"] = values.astype(np.float32)
    save_file(tensors, target / "adapter_model.safetensors")


def compile_image(source: Path, base_file: Path, image: Path, dtype: str = "bf16") -> str:
    """Compile one adapter; returns its digest."""
    command = [sys.executable, "-m", "loraplex.engine.compile_adapter", str(source)]
    command += ["--base", str(base_file), "--out", str(image), "--dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the compiler failed: {done.stdout}{done.stderr}")
    return str(json.loads(done.stdout.splitlines()[-1])["digest"])


def main() -> None:
    """The command line: prints the digests."""
    parser = argparse.ArgumentParser(description="Make random adapter images.")
    parser.add_argument("count", type=int)
    parser.add_argument("--base", type=Path, required=True, help="base.json")
    parser.add_argument("--store", required=True, help="URL or directory of the image store")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = ImageStore(options.store)
        print(*make_images(options.base.absolute(), store, options.count, Path(folder)), sep="\n")


if __name__ == "__main__":
    main()
