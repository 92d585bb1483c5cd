"""The GPU kit, as far as it goes without a GPU: steps, failures, roofline, loading of peers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import cuda_latency, latency_vs_K, peer_vllm, roofline
from benchmarks.device import kit
from benchmarks.inputs import PRESETS, planted_blocks, planted_head
from benchmarks.peers import MarkovLoop
from benchmarks.timing import Ceilings, Spread

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "benchmarks" / "device" / "run.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(RUN), *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The steps' own folder, for this test alone."""
    monkeypatch.setattr(kit, "WORK", tmp_path / "work")
    kit.WORK.mkdir()
    return kit.WORK


def python_step(name: str, code: str, limit: int = 20, **fields: Any) -> kit.Step:
    return kit.Step(name, (sys.executable, "-c", code), limit, **fields)


# ------------------------------------------------------------------------------------- the steps


def test_a_dry_run_finds_every_file_and_import() -> None:
    result = run("--dry-run")
    assert result.returncode == 0, result.stdout
    assert [line for line in result.stdout.splitlines() if line.endswith("is missing")] == [
        line for line in result.stdout.splitlines() if "triton is missing" in line
    ]


def test_the_list_has_every_measurement_of_the_kit() -> None:
    names = run("--list").stdout.split()
    assert names == [step.name for step in kit.steps()]
    assert {f"sanitizer-{tool}" for tool in kit.SANITIZERS} <= set(names)
    assert {f"latency-{N}" for N in (1, 8, 32)} <= set(names)
    assert {"environment", "build", "micro", "tests", "graphs", "draft", "roofline"} <= set(names)


def test_all_steps_together_fit_into_eight_minutes() -> None:
    assert kit.BUDGET_S < 8 * 60
    assert all(0 < step.limit_s <= kit.BUDGET_S for step in kit.steps())


def test_an_unknown_step_is_refused_with_the_known_ones() -> None:
    result = run("latencies")
    assert result.returncode == 2
    assert "no step latencies; the steps are environment, build" in result.stderr


def test_what_is_missing_fails_the_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "importing.py"
    script.write_text("import gone_altogether\n")
    gone = "benchmarks/device/gone.py"
    step = kit.Step("gone", (sys.executable, gone, str(script)), 1, modules=("gone_too",))
    assert kit.dry_run([step]) == 1
    printed = capsys.readouterr().out
    assert f"{gone} is missing" in printed
    assert "Python module gone_too is missing" in printed
    assert "No module named 'gone_altogether'" in printed


@pytest.mark.parametrize(
    ("code", "limit", "status", "detail"),
    [
        ("print('{\"a\": 1}')", 20, "ok", ""),
        ("print('no')", 20, "failed", "its output is no JSON"),
        ("raise SystemExit('the reason')", 20, "failed", "the reason"),
        ("import time; print('begun', flush=True); time.sleep(60)", 3, "timed out", "begun"),
    ],
)
def test_what_becomes_of_a_step(
    work: Path, code: str, limit: int, status: str, detail: str
) -> None:
    outcome = kit.run(python_step("s", code, limit, json=True), 60)
    assert (outcome.status, outcome.detail) == (status, detail)
    assert (work / "s.json").is_file() == (status == "ok")


def test_nothing_that_a_step_started_outlives_it(work: Path) -> None:
    inner = "import time; time.sleep(60)"
    code = f"import subprocess as s, sys; print(s.Popen([sys.executable, '-c', {inner!r}]).pid)"
    outcome = kit.run(python_step("s", f"{code}; import time; time.sleep(60)", 3), 60)
    assert outcome.status == "timed out"
    status = Path(f"/proc/{int(outcome.output)}/status")
    state = status.read_text().split("State:")[1].split()[0] if status.exists() else "gone"
    assert state in ("gone", "Z")


def test_a_program_that_is_not_installed_fails_its_step(work: Path) -> None:
    outcome = kit.run(kit.Step("s", ("compute-sanitizer-of-nobody",), 1), 60)
    assert outcome.status == "failed"
    assert "is not installed" in outcome.detail


def test_the_run_goes_on_after_a_failure_and_says_so(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = '{"copy_gb_s": {"median": 4300, "p20": 4200, "p80": 4400}, "gpu": "some"}'
    planned = [
        python_step("first", "raise SystemExit('broken')"),
        python_step("second", f"print('{figures}')", json=True),
        python_step("third", "print('| a table |')", shown=True),
    ]
    monkeypatch.setattr(kit, "steps", lambda: planned)
    monkeypatch.chdir(ROOT)
    (work / "third.json").write_text("{}")  # of an earlier run
    out = tmp_path / "out"
    assert kit.main(["--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "failed: first" in printed
    assert "   4300.00  (4200.00 .. 4400.00)" in printed
    assert sorted(path.name for path in out.iterdir()) == ["kit.json", "kit.log", "kit.txt"]
    assert printed.endswith((out / "kit.txt").read_text())
    assert "broken" in (out / "kit.log").read_text()
    kept = json.loads((out / "kit.json").read_text())
    states = [(at["name"], at["status"], at["detail"]) for at in kept["steps"]]
    assert states == [("first", "failed", "broken"), ("second", "ok", ""), ("third", "ok", "")]
    assert kept["results"] == {"second": json.loads(figures)}


def test_steps_are_skipped_when_the_time_is_over(work: Path, tmp_path: Path) -> None:
    steps = [python_step("first", "import time; time.sleep(60)"), python_step("second", "pass")]
    outcomes = kit.run_all(steps, tmp_path / "out", 6)
    assert [at.status for at in outcomes] == ["timed out", "skipped"]
    assert "failed: first, second" in (tmp_path / "out" / "kit.txt").read_text()


def test_the_library_may_be_built_or_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XPRESS_LIBRARY", raising=False)
    for architecture, spelled in (("90a", "9.0a"), ("80", "8.0"), ("120", "12.0")):
        monkeypatch.setenv("XPRESS_KIT_ARCH", architecture)
        assert kit.build_step().environment["TORCH_CUDA_ARCH_LIST"] == spelled
    library = str(ROOT / "xpress_ext" / "libxpress_ops.so")
    monkeypatch.setenv("XPRESS_LIBRARY", library)
    step = kit.build_step()
    assert step.command[-2:] == (library, "xpress_ext/libxpress_ops.so")
    done = subprocess.run(step.command, cwd=ROOT, capture_output=True, text=True)
    assert "BuildInfo(" in done.stdout, done.stderr
    if not torch.cuda.is_available():
        assert done.returncode != 0  # a library without operators for this GPU is of no use


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_micro_measurements_compile(work: Path) -> None:
    step = next(s for s in kit.steps() if s.name == "micro-build")
    command = [*step.command, "-Xcompiler=-Wall,-Wextra", "--Werror=all-warnings"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (work / "micro").is_file()


@pytest.mark.parametrize(
    "script", ["tiny.py --device cpu", "draft.py --device cpu --size tiny"], ids=lambda s: s[:5]
)
def test_what_the_steps_run_runs_on_the_cpu(script: str) -> None:
    """The same scripts, with the CPU's operators."""
    name, *arguments = script.split()
    command = [sys.executable, f"benchmarks/device/{name}", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    if name == "draft.py":
        report = json.loads(result.stdout)
        assert report["changed_by_refining"] > 0
        assert report["unexplained"] == report["exact_differs_from_full"] == 0


# ---------------------------------------------------------------------------------- the roofline


def test_the_floors_are_those_of_the_designs(tmp_path: Path) -> None:
    assert roofline.main(["--N", "1", "64", "--json", str(tmp_path / "r.json")]) == 0
    at = {
        (row["name"], row["N"]): row
        for row in json.loads((tmp_path / "r.json").read_text())["stages"]
    }
    full = at["full readout, a pass", 1]
    assert full["num_bytes"] == pytest.approx(77.8e6 + 4.6e6, rel=1e-3)
    assert full["bytes_us"] == pytest.approx(17.2, abs=0.1)
    assert at["  with W_r in fp8", 1]["num_bytes"] == pytest.approx(38.9e6 + 4.6e6, rel=1e-3)
    assert at["full readout, a pass", 64]["flop"] == pytest.approx(75e9, rel=0.01)


def test_measured_bandwidths_take_the_place_of_the_datasheet(tmp_path: Path) -> None:
    micro = tmp_path / "micro.json"
    reads = {"4": {"median": 9000}, "26": {"median": 8000}, "78": {"median": 5000}}
    copy = {"median": 4300}
    text = {"gpu": "some GPU", "sms": 7, "l2_mb": 60, "copy_gb_s": copy, "read_gb_s": reads}
    micro.write_text(json.dumps(text))
    gpu = roofline.measured(roofline.GPUS["h200"], json.loads(micro.read_text()))
    assert (gpu.name, gpu.sms, gpu.memory_gb_s, gpu.l2_gb_s) == ("some GPU", 7, 4300, 9000)
    latent = next(
        s for s in roofline.stages(PRESETS["qwen3-8b"], 1, 32, 7) if s.name.startswith("latent")
    )
    assert roofline.floors(gpu, latent)["l2_us"] == pytest.approx(latent.num_bytes / 9e6)


@pytest.mark.parametrize("text", ["{}", "[1]", "no json"])
def test_a_file_that_is_no_measurement_is_refused(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "micro.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        roofline.main(["--micro", str(path)])
    assert f"--micro {path}" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- the peers


def test_the_markov_peer_decodes_serially() -> None:
    head = planted_head(PRESETS["tiny"], torch.float32)
    blocks = planted_blocks(head, 3, "worst", torch.float32)
    tokens = MarkovLoop(head)(blocks.base_logits, blocks.anchor)
    token = blocks.anchor
    for k in range(blocks.base_logits.shape[1]):
        bias = head.token_table[token] @ head.readout.T
        token = (blocks.base_logits[:, k] + bias).argmax(-1)
        assert torch.equal(tokens[:, k], token)


class OnCpu:
    """Stands in for a captured call: its tokens, and nothing of its time."""

    def __init__(self, call: Any, captured: bool) -> None:
        self.tokens = call()


def test_a_batch_of_the_gpu_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lines and its table, with the CPU's operators and made-up times."""

    def times(replays: dict[Any, Any], repeats: int, cold: bool) -> dict[Any, Spread]:
        return {(name, K): Spread(*3 * [10.0 * K + len(name)]) for name, K in replays}

    monkeypatch.setattr(cuda_latency, "Replay", OnCpu)
    monkeypatch.setattr(cuda_latency, "time_all", times)
    argv = ["--preset", "tiny", "--no-compile", "--C", "4", "--N", "2"]
    args = latency_vs_K.parse_args(argv)
    batch = cuda_latency.run_batch(args, latency_vs_K.Bench, 2, Ceilings(100.0, 1000.0))
    lines = {line["name"]: line for line in batch["lines"]}
    assert batch["failures"] == {}
    # bf16 logits of plain torch may tie where ours do not; ours are right.
    assert [line["wrong_tokens"] for line in lines.values() if line["ours"]] == [0, 0, 0]
    assert list(lines["xpress full"]["us_per_block"]["cold"]) == ["1", "4", "6", "7"]
    ratio = lines["torch eager"]["times_as_slow"]["hot"]["7"]
    assert ratio == (70 + len("torch eager")) / (70 + len("xpress full"))
    result = {"machine": {"torch": "2"}, "ceilings": {"copy_gb_s": 1.0}, "batches": [batch]}
    assert not latency_vs_K.failed(result)
    cuda_latency.print_batches(json.loads(json.dumps(result)))
    printed = capsys.readouterr().out
    assert "N=2, cold caches" in printed
    assert "1.00x" in printed
    lines["xpress full"]["wrong_tokens"] = 1
    assert latency_vs_K.failed(result)


def test_a_gpu_benchmark_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert latency_vs_K.main(["--device", "cuda"]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda", "--dtype", "fp16"], "--device cuda measures bf16"),
        (["--device", "cuda", "--bars"], "without --bars"),
        (["--peer-vllm", "somewhere"], "runs on a GPU only"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        latency_vs_K.parse_args(arguments)
    assert message in capsys.readouterr().err


# Two files of the shape that the loader expects: imports from the rest of their package, a head
# with the parameters of an XPress refiner, and kernels in a module of their own.
KERNELS = "from vllm.triton_utils import tl, triton\n\nMARK = 7\n"
HEAD = """
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.logits_processor import LogitsProcessor, _topk
from vllm.v1.worker.gpu.spec_decode.xpress import kernels
from .qwen3_dflash import DFlashQwen3ForCausalLM

init_logger(__name__).info("loaded")


class XPressRefinerHead(torch.nn.Module):
    def __init__(self, vocab, hidden, slots, rank, width, max_num_reqs, topc):
        super().__init__()
        linear = lambda i, o: torch.nn.Linear(i, o, bias=False)
        self.w1, self.w2 = torch.nn.Embedding(vocab, rank), linear(rank, vocab)
        self.down_h, self.down_g = linear(hidden, rank), linear(hidden, rank)
        self.in_proj, self.mix_L = linear(3 * rank, rank), torch.nn.Parameter(
            torch.zeros(rank, slots, slots))
        self.mlp_gate, self.mlp_up = linear(rank, width), linear(rank, width)
        self.mlp_down, self.topc = linear(width, rank), topc

    def build_fused_buffers(self):
        self.mark = kernels.MARK

    def jacobi_refine_greedy(self, base, hidden, anchor, predecessor, num_passes):
        g = hidden.mean(1, keepdim=True).expand_as(hidden)
        cache = torch.cat([self.down_h(hidden), self.down_g(g)], -1)
        tokens = _topk(base[:, 1:], 1)[1][..., 0] if self.topc else base[:, 1:].argmax(-1)
        for _ in range(num_passes):
            prev = torch.cat([predecessor[:, None], anchor[:, None], tokens[:, :-1]], 1)
            x = self.in_proj(torch.cat([cache, self.w1(prev)], -1))
            x = torch.einsum("ckj,njc->nkc", self.mix_L, x)
            gate = torch.nn.functional.silu(self.mlp_gate(x)) * self.mlp_up(x)
            tokens = (base + self.w2(x + self.mlp_down(gate)))[:, 1:].argmax(-1)
        return tokens
"""


def test_the_vllm_peer_loads_its_two_files_and_takes_our_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in ((peer_vllm.KERNELS, KERNELS), (peer_vllm.HEAD, HEAD)):
        path = tmp_path / (name.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(peer_vllm, "_triton", lambda: (object(), object()))
    head_class = peer_vllm.load(tmp_path)
    assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]

    head = planted_head(PRESETS["tiny"], torch.float32)
    blocks = planted_blocks(head, 2, "worst", torch.float32)
    base, hidden, anchor, predecessor = blocks.tensors()
    peer = peer_vllm.VllmHead(head_class, head, N=2, C=0)
    with_anchor = torch.cat([torch.zeros_like(base[:, :1]), base], dim=1)
    tokens: Tensor = peer(with_anchor, hidden, anchor, predecessor, base.shape[1])
    assert torch.equal(tokens, blocks.answer)
    inner: Any = peer.head
    assert inner.mark == 7


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"unpacked vLLM 0\.33 wheel"):
        peer_vllm.load(tmp_path)
