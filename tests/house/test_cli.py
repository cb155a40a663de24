"""The command line against a running platform."""

import json
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "adapters"
PATIENCE_S = 240


@pytest.fixture
def run(house, served):
    """Run a command against the platform; returns what it printed, once its code is checked."""

    def command(*words: str, code: int = 0, **settings: str) -> str:
        settings = {"LORAPLEX_DATA_DIR": str(served.data_dir)} | settings
        done = subprocess.run(
            [house.command, *words],
            env=house.environment(**settings),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        for secret in (served.api_key, served.operator_key):
            assert secret not in done.stdout + done.stderr
        return done.stdout if code == 0 else done.stdout + done.stderr

    return command


@pytest.fixture
def tenant(run) -> str:
    """The id of a new tenant."""
    name = f"cli-{sum(1 for _ in run('tenants', 'list').splitlines())}"
    return json.loads(run("tenants", "create", name, "--json"))["id"]


def test_limits_are_set_shown_and_lifted(run) -> None:
    made = json.loads(run("tenants", "create", "limited", "--requests-per-minute", "5", "--json"))
    assert (made["requests_per_minute"], made["max_concurrency"]) == (5, None)
    words = ("tenants", "limits", made["id"], "--json")
    run(*words, "--max-concurrency", "2", "--requests-per-minute", "unlimited")
    shown = json.loads(run(*words))
    assert (shown["requests_per_minute"], shown["max_concurrency"]) == (None, 2)
    assert "limited" in run("tenants", "list")


def test_a_key_opens_until_it_is_revoked(run, served, tenant) -> None:
    words = ("keys", "create", "laptop", "--tenant", tenant, "--scope", "infer", "--days", "3")
    made = json.loads(run(*words, "--json"))
    assert made["scopes"] == ["infer"]
    assert made["expires_at"] > made["created_at"]
    with served.http(made["secret"]) as client:
        assert client.get("/v1/models").status_code == 200
        assert made["id"] in run("keys", "list", "--tenant", tenant)
        assert made["secret"] not in run("keys", "list", "--tenant", tenant)
        run("keys", "revoke", made["id"])
        assert client.get("/v1/models").status_code == 401


def test_an_operator_key_is_made_without_a_tenant(run) -> None:
    made = json.loads(run("keys", "create", "second operator", "--json"))
    assert (made["tenant_id"], made["scopes"]) == (None, ["admin"])
    assert "second operator" in run("keys", "list", LORAPLEX_API_KEY=made["secret"])


def test_adapters_are_uploaded_listed_and_removed(run, served, tenant, tmp_path: Path) -> None:
    scopes = ("--scope", "adapters:read", "--scope", "adapters:write")
    key = json.loads(run("keys", "create", "ci", "--tenant", tenant, *scopes, "--json"))["secret"]
    source = EXAMPLES / served.adapters[0]
    archive = tmp_path / "adapter.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            packed.write(source / name, name)
    first = json.loads(
        run("adapters", "upload", "mine", str(source), "--json", LORAPLEX_API_KEY=key)
    )
    assert (first["id"], first["rank"] > 0) == ("mine@1", True)
    second = json.loads(
        run("adapters", "upload", "mine", str(archive), "--json", LORAPLEX_API_KEY=key)
    )
    assert (second["id"], second["digest"]) == ("mine@2", first["digest"])
    (listed,) = json.loads(run("adapters", "list", "--json", LORAPLEX_API_KEY=key))
    assert (listed["name"], listed["version"]) == ("mine", 2)
    assert run("adapters", "rm", "mine", LORAPLEX_API_KEY=key) == "mine is removed\n"
    assert json.loads(run("adapters", "list", "--json", LORAPLEX_API_KEY=key)) == []


def test_a_refused_adapter_is_refused_with_every_reason(run, served, tmp_path: Path) -> None:
    source = tmp_path / "broken"
    shutil.copytree(EXAMPLES / served.adapters[0], source)
    config = json.loads((source / "adapter_config.json").read_text())
    config |= {"lora_alpha": "many", "modules_to_save": ["lm_head"]}
    (source / "adapter_config.json").write_text(json.dumps(config))
    said = run("adapters", "upload", "broken", str(source), code=1)
    reasons = [line for line in said.splitlines() if line.startswith("- ")]
    assert len(reasons) == 2
    assert "'many'" in "".join(reasons)
    assert "lm_head" in "".join(reasons)


def test_a_folder_that_is_no_adapter_is_not_sent(run, tmp_path: Path) -> None:
    said = run("adapters", "upload", "empty", str(tmp_path), code=1)
    assert "adapter_config.json and adapter_model.safetensors not found" in said


def test_an_error_of_the_api_is_its_message(run) -> None:
    assert run("tenants", "limits", "ten_none", code=1) == "There is no tenant 'ten_none'.\n"
    assert "lower-case letters" in run("tenants", "create", "No Good", code=1)


def test_a_tenant_may_not_do_what_an_operator_may(run, served, house) -> None:
    done = subprocess.run(
        [house.command, "tenants", "list", "--url", f"{served.url}/v1"],
        env=house.environment(LORAPLEX_API_KEY=served.api_key),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "Only an operator's key may do this.\n")


def test_nobody_answers(run) -> None:
    said = run("adapters", "list", "--url", "http://127.0.0.1:1", code=1)
    assert said.startswith("Nothing answers at http://127.0.0.1:1; start it with `loraplex serve`")


def test_there_is_no_key(run, tmp_path: Path) -> None:
    said = run("adapters", "list", code=1, LORAPLEX_DATA_DIR=str(tmp_path))
    assert said.startswith("No API key: ")


def test_the_doctor_finds_a_running_platform_well(run) -> None:
    findings = json.loads(run("doctor", "--json"))
    assert [finding["what"] for finding in findings if finding["state"] == "wrong"] == []
    found = {finding["what"]: finding["found"] for finding in findings}
    name, _, why = found["executor"].partition(": ")
    assert name in ("gpu", "native", "torch") and why
    assert " executor on " in found["engine"]


def test_the_doctor_says_what_is_wrong_and_how_to_mend_it(run, tmp_path: Path) -> None:
    settings = {
        "LORAPLEX_DATA_DIR": str(tmp_path / "fresh"),
        "LORAPLEX_MODEL": "/nowhere/model.gguf",
        "LORAPLEX_REDIS_URL": "redis://:hushhush@127.0.0.1:1",
        "LORAPLEX_PORT": "0",
    }
    said = run("doctor", code=1, LORAPLEX_BACKEND="reference", **settings)
    assert "! executor" in said and "reference: LORAPLEX_BACKEND asks for it" in said
    assert "✗ model" in said
    assert "✗ Redis" in said
    assert "→ Give --model" in said
    assert "hushhush" not in said
    assert not (tmp_path / "fresh").exists(), "it changes nothing"


def test_the_doctor_names_a_setting_that_cannot_be(run, tmp_path: Path) -> None:
    fresh = {"LORAPLEX_DATA_DIR": str(tmp_path), "LORAPLEX_PORT": "0"}
    said = run("doctor", code=1, LORAPLEX_BACKEND="cuda", **fresh)
    assert "✗ executor" in said
    assert "LORAPLEX_BACKEND is 'cuda'; give one of triton, cpu, reference" in said


def test_help_loads_next_to_nothing() -> None:
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from loraplex.platform.cli import app\n"
        "heavy = {'httpx', 'sqlalchemy', 'pydantic', 'fastapi', 'zmq', 'msgspec', 'rich.console'}\n"
        "before = heavy & set(sys.modules)\n"
        "result = CliRunner().invoke(app, ['--help'])\n"
        "print(result.exit_code, *sorted(before), *sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "0"


def test_the_version_is_the_package_s(run) -> None:
    assert run("version").strip() == version("loraplex")
