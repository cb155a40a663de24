"""The engine: one base, token ids, image digests; knows no HTTP, SQL, Redis, names or text."""
