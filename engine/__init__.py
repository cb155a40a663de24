"""The engine: one base, token ids, image digests; knows no HTTP, SQL, Redis, names or text."""

import os

# Read when torch is first imported: with the default, OpenMP's threads spin between operators, and
# on cores that anything else uses, every operator then waits for a thread that is not running.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
