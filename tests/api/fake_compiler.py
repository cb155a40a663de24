"""Stands in for the adapter compiler: the same command line, whose outcome the weights spell out.

The weights are text: "ok", a rank, "reject", "config" (at fault), "crash", "hang", "slow" (hangs
once), "full" (finds no room once) or "babble".
"""

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("source", type=Path)
for option in ("base", "out", "dtype", "seconds"):
    parser.add_argument(f"--{option}", required=True)
options = parser.parse_args()
wanted = (options.source / "adapter_model.safetensors").read_text()
json.loads((options.source / "adapter_config.json").read_text())
if wanted == "hang":
    print("hanging", file=sys.stderr, flush=True)
    time.sleep(600)
if wanted in ("slow", "full") and not (tried := Path(options.out).with_name("tried")).exists():
    tried.touch()
    if wanted == "full":
        sys.exit("the adapter could not be compiled: [Errno 28] No space left on device")
    time.sleep(600)
if wanted == "crash":
    sys.exit("a secret path")
if wanted == "babble":
    sys.stdout.write("x" * (8 << 20))
REJECTIONS = {
    "reject": [
        {"code": "weights_nan", "message": "A weight is NaN. Train again."},
        {"code": "module_unknown", "message": "There is no module x_proj."},
    ],
    "config": [{"code": "config_field", "message": "r is 'many', not a number. Correct it."}],
}
if wanted in REJECTIONS:
    print(json.dumps({"reasons": REJECTIONS[wanted]}))
    sys.exit(3)
variant = "" if options.dtype == "bf16" else f" in {options.dtype}"
image = f"an image of {wanted}{variant}".encode()
Path(options.out).write_bytes(image)
report = {
    "digest": hashlib.sha256(image).hexdigest(),
    "bytes": len(image),
    "rank": int(wanted) if wanted.isdecimal() else 8,
    "modules": {"q_proj": 2},
    "coverage": {"q_proj": {"layers": 2, "of": 2}},
    "dora": False,
    "rslora": False,
    "parameters": 64,
    "warnings": [],
}
print(json.dumps(report))
