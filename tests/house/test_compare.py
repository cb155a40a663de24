"""The comparison's arithmetic, its command line, and how it holds a peer; no peer is run."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ECHO = """
import sys
sys.path.insert(0, {folder!r})
from wire import serve

def run(work):
    print("libraries talk")
    return [[float(i) for i in range(work.tokens)] for _ in work.prompts]

serve(lambda setup: ({{"threads": setup.threads}}, run))
"""


@pytest.fixture(scope="module")
def modules() -> Iterator[SimpleNamespace]:
    """The benchmark's own modules, which are scripts beside each other and no package."""
    names = ["compare", "workload", "against_self", "peers.wire", "peers.process"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        loaded = {name.split(".")[-1]: importlib.import_module(name) for name in names}
        yield SimpleNamespace(**loaded)
        for name in [n for n, m in sys.modules.items() if _is_ours(m)]:
            del sys.modules[name]


def _is_ours(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and BENCHMARKS in Path(file).parents


@pytest.fixture
def work(modules: SimpleNamespace) -> Any:
    """Two rows of three tokens, both under the one adapter."""
    return modules.wire.Work("decode", 1, 3, ((1, 2), (3, 4)))


def _setup(modules: SimpleNamespace, folder: Path) -> Any:
    return modules.wire.Setup("m", "g", str(folder), (), 2, "auto", "none", 8, 64, 16)


def test_decode_counts_what_came_after_every_row_had_a_token(
    modules: SimpleNamespace, work: Any
) -> None:
    times = [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]
    assert modules.wire.tokens_per_s(work, times) == 3 / (4.0 - 2.0)


def test_prefill_counts_prompt_tokens_until_the_last_first_token(modules: SimpleNamespace) -> None:
    work = modules.wire.Work("prefill", 0, 1, ((1, 2, 3), (4, 5, 6)))
    assert modules.wire.tokens_per_s(work, [[0.5], [2.0]]) == 6 / 2.0


@pytest.mark.parametrize("times", [[[1.0, 2.0, 3.0]], [[1.0, 2.0], [1.0, 2.0, 3.0]]])
def test_a_row_that_ended_early_is_no_result(
    modules: SimpleNamespace, work: Any, times: list[list[float]]
) -> None:
    with pytest.raises(ValueError, match="3 expected"):
        modules.wire.tokens_per_s(work, times)


def test_rows_share_adapters_in_turn(modules: SimpleNamespace) -> None:
    prompts = ((1,), (2,), (3,))
    assert modules.wire.Work("decode", 2, 1, prompts).adapters_of_rows() == [0, 1, 0]
    assert modules.wire.Work("decode", 0, 1, prompts).adapters_of_rows() == [None] * 3


def test_no_prompt_comes_twice(modules: SimpleNamespace) -> None:
    prompts = modules.workload.Prompts()
    works = [prompts.work(case) for case in modules.workload.CASES for _ in range(2)]
    seen = [prompt[:4] for work in works for prompt in work.prompts]
    assert len(seen) == len(set(seen))


def test_a_peer_runs_only_what_it_can(modules: SimpleNamespace) -> None:
    names = {name: _keys(modules, rival.ability) for name, rival in modules.compare.RIVALS.items()}
    assert names["llama-cpp"] == ["decode_1_base"]
    assert names["openvino"] == ["decode_1_base", "decode_8_base", "decode_32_base", "prefill_base"]
    assert set(names["vllm-cpu"]) == set(names["peft"]) > set(modules.workload.RATIOS)


def _keys(modules: SimpleNamespace, ability: Any) -> list[str]:
    return [modules.workload.key(case) for case in ability.cases()]


def test_the_result_has_the_ratios_that_are_asked_for(modules: SimpleNamespace) -> None:
    rates = {"decode_8_lora1": (10.0, 5.0), "decode_8_base": (30.04, 10.0)}
    found = modules.compare.result("peft", rates, {"cores": 2}, {"dtype": "float32"})
    assert found == {
        "peer": "peft",
        "ours": {"facts": {"cores": 2}, "decode_8_lora1": 10.0, "decode_8_base": 30.0},
        "theirs": {"facts": {"dtype": "float32"}, "decode_8_lora1": 5.0, "decode_8_base": 10.0},
        "ratios": {"decode_8_base": 3.0},
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--peer"),
        (["--peer", "nobody"], "invalid choice"),
        (["--peer", "vllm-cpu", "--quantization", "int8"], "runs no int8 base"),
        (["--peer", "openvino", "--only", "decode_8_lora8"], "can do none of decode_8_lora8"),
        (["--peer", "peft", "--repeat", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_done_is_said(
    modules: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        modules.compare.parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_costs_against_ourselves(modules: SimpleNamespace) -> None:
    """One byte a second: a base of 10 bytes takes 10 s a step, an image as long as its size."""
    own, sizes = modules.against_self, {(8, "bf16"): 1, (64, "bf16"): 8, (16, "bf16"): 2}
    rates = {m: m.rows / (10 + m.adapters * sizes.get((m.rank, m.images), 1)) for m in own.MEASURES}
    rates[own.INT8_BASE] = 0.2
    found = own.ratios(rates, sizes, base_size=10)
    assert found["decode_8_lora1_r16_bf16"] == pytest.approx(10 / 12, abs=1e-3)
    assert found["int8_base_1"] == 2.0
    assert found["rank_8_to_64_over_bytes"] == found["distinct_1_to_32_over_bytes"] == 1.0


def test_a_peer_is_stopped_while_it_has_nothing_to_do(
    modules: SimpleNamespace, work: Any, tmp_path: Path
) -> None:
    script = tmp_path / "echo.py"
    script.write_text(ECHO.format(folder=str(BENCHMARKS / "peers")))
    setup = _setup(modules, tmp_path)
    with modules.process.Peer(sys.executable, str(script), setup) as peer:
        assert peer.facts == {"threads": 2}
        for _ in range(2):
            assert peer.run(work) == [[0.0, 1.0, 2.0]] * 2
            assert peer.is_stopped
    assert (tmp_path / "base.log").read_text() == "libraries talk\n" * 2


def test_a_peer_that_fails_is_quoted(modules: SimpleNamespace, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise RuntimeError('no such model')")
    with pytest.raises(modules.process.PeerError, match="no such model"):
        modules.process.Peer(sys.executable, str(script), _setup(modules, tmp_path))
