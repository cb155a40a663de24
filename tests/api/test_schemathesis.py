"""schemathesis, by its own command line, against the OpenAPI document of a listening app.

By default a few cases of each operation; with `LORAPLEX_SCHEMATHESIS_EXAMPLES` set, so many of each
and the cases of its coverage phase too, which take minutes.
"""

import os
import sys
from pathlib import Path

import anyio
import pytest

pytestmark = pytest.mark.anyio

EXAMPLES = os.environ.get("LORAPLEX_SCHEMATHESIS_EXAMPLES")
CONFIG = Path(__file__).with_name("schemathesis.toml")
OWN_KEY = ("keys_revoke", "keys_rotate", "keys_change")  # which would end the run's own key
PHASES = {"acme": "examples,fuzzing", "operator": "fuzzing", None: "examples"}
# An operator must say for which tenant, which no schema can tell of one caller alone.
UNTRUE = {"operator": ["--exclude-checks=positive_data_acceptance"]}


@pytest.mark.parametrize("key", PHASES)
async def test_the_document_is_true(world, key, tmp_path):
    await world.add_adapter("acme", "support")
    header = [f"--header=Authorization: Bearer {world.keys[key]}"] if key else []
    async with world.listening() as url:
        run = await anyio.run_process(
            [
                Path(sys.executable).with_name("st"),
                f"--config-file={CONFIG}",
                "run",
                f"{url}/openapi.json",
                f"--phases={'examples,coverage,fuzzing' if EXAMPLES else PHASES[key]}",
                f"--max-examples={EXAMPLES or 1}",
                "--generation-deterministic",
                *(f"--exclude-operation-id={each}" for each in OWN_KEY),
                *header,
                *UNTRUE.get(key, ()),
            ],
            check=False,
            cwd=tmp_path,
        )
    assert run.returncode == 0, (run.stdout + run.stderr).decode()
