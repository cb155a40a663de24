"""Stands in for the adapter compiler: the same command line, whose outcome the weights spell out.

The weights are text: "ok", "reject", "crash", "hang" or "babble".
"""

import hashlib
import json
import sys
import time
from pathlib import Path

source, _, _, _, out = sys.argv[1:]
wanted = (Path(source) / "adapter_model.safetensors").read_text()
json.loads((Path(source) / "adapter_config.json").read_text())
if wanted == "hang":
    print("hanging", file=sys.stderr, flush=True)
    time.sleep(600)
if wanted == "crash":
    sys.exit("a secret path")
if wanted == "babble":
    sys.stdout.write("x" * (8 << 20))
if wanted == "reject":
    reasons = [
        {"code": "weights_nan", "message": "A weight is NaN. Train again."},
        {"code": "module_unknown", "message": "There is no module x_proj."},
    ]
    print(json.dumps({"reasons": reasons}))
    sys.exit(3)
image = f"an image of {wanted}".encode()
Path(out).write_bytes(image)
report = {
    "digest": hashlib.sha256(image).hexdigest(),
    "bytes": len(image),
    "rank": int(wanted) if wanted.isdecimal() else 8,
    "modules": {"q_proj": 2},
    "dora": False,
    "rslora": False,
    "parameters": 64,
    "warnings": [],
}
print(json.dumps(report))
