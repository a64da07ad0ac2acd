"""Check that vLLM calls its attention operators natively, and that it decodes the same tokens.

`nox -s "realworld(part='vllm')"` runs this script with the packages in
`requirements/realworld-vllm.txt`. vLLM decodes on the CPU with a tiny Llama model that has random
weights. It runs in three ways: unchanged, with accelerated operators, and with `torchop.compat`'s
function in place of vLLM's own helper for registering operators. Each way runs in separate
processes, without and with vLLM's compilation. All runs must return the same tokens and
log-probabilities, bit by bit. All calls to the two attention operators, which vLLM calls for each
layer and token, must be native. At the end, the script times the calls to these operators inside
vLLM, and a whole token.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchop
import torchop.compat
from _overhead import overhead
from torchop._native.table import calls as table
from torchop._schema.naming import OpName

HOT = ("vllm::unified_kv_cache_update", "vllm::unified_attention_with_output")
WAYS = ("plain", "accelerated", "helper")
PROMPTS = ([1, 5, 9, 20], [7, 3], [11, 64, 32, 2, 90, 17, 41])
TOKENS = 32
ROUNDS = 5

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = CONFIG["num_hidden_layers"]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def write_model(folder: Path) -> None:
    width, inside, words = (
        CONFIG[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    shapes = {"model.embed_tokens": (words, width), "lm_head": (words, width)}
    shapes |= {"model.norm": (width,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj": (width, width) for name in "qkvo"}
        shapes |= {f"{at}.mlp.{name}_proj": (inside, width) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj": (width, inside)}
        shapes |= {f"{at}.{n}_layernorm": (width,) for n in ("input", "post_attention")}
    torch.manual_seed(0)
    weights = {
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(shape) / 8
        for name, shape in shapes.items()
    }
    importlib.import_module("safetensors.torch").save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))


def engine(way: str, model: str, *, compiled: bool) -> Any:
    if way == "accelerated":
        torchop.accelerate("vllm::*")
    if way == "helper":
        helpers = importlib.import_module("vllm.utils.torch_utils")
        helpers.direct_register_custom_op = torchop.compat.direct_register_custom_op
    vllm: Any = importlib.import_module("vllm")
    return vllm.LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=not compiled,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=len(PROMPTS),
        disable_log_stats=True,
        enable_prefix_caching=False,
        seed=0,
    )


def decode(llm: Any) -> list[list[tuple[int, float]]]:
    vllm: Any = importlib.import_module("vllm")
    options = vllm.SamplingParams(
        temperature=1.0, seed=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, options, use_tqdm=False)
    return [
        [
            (token, known[token].logprob)
            for token, known in zip(o.token_ids, o.logprobs, strict=True)
        ]
        for o in (output.outputs[0] for output in outputs)
    ]


def run(way: str, model: str, *, compiled: bool) -> dict[str, Any]:
    llm = engine(way, model, compiled=compiled)
    decode(llm)  # the first call to an operator is not native, because it sets up native calls
    before = {name: dict(torchop.native.counters(name)) for name in HOT if way != "plain"}
    tokens = decode(llm)
    calls = {
        name: {
            reason: count - counted.get(reason, 0)
            for reason, count in torchop.native.counters(name).items()
            if count != counted.get(reason, 0)
        }
        for name, counted in before.items()
    }
    report: dict[str, Any] = {"tokens": tokens, "calls": calls}
    if way == "plain" and not compiled:
        report["times"] = measure(llm)
    return report


def measure(llm: Any) -> list[str]:
    rows = []
    look_at_calls(functools.partial(measure_call, rows))
    decode(llm)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        times[False].append(token_time(llm))
        with torchop.accelerate("vllm::*"):
            times[True].append(token_time(llm))
    before, after = (statistics.median(times[way]) for way in (False, True))
    return [*rows, f"{'a token of three requests':42}{before:9.0f}{after:9.0f}"]


def measure_call(rows: list[str], packet: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    name = packet._qualified_op_name
    call = functools.partial(packet, *args, **kwargs)
    before, after = [], []
    for _ in range(ROUNDS):
        with torchop.accelerate(name):
            known = table.accelerated[OpName.parse(name)]
            kernel = functools.partial(known.entry.explain(*args, **kwargs)[2], *args, **kwargs)
            after.append(overhead(call, kernel))
        before.append(overhead(call, kernel))
    over = [statistics.median(row.over for row in rounds) for rounds in (before, after)]
    took = [statistics.median(row.call for row in rounds) for rounds in (before, after)]
    alone = statistics.median(row.kernel for row in after)
    rows.append(
        f"{name:42}{took[0]:9.1f}{took[1]:9.1f}{alone:9.1f}"
        f"   added to the kernel: {over[0]:.2f} before, {over[1]:.2f} after"
    )


def look_at_calls(look: Callable[[Any, tuple[Any, ...], Any], None]) -> None:
    """Decode, and call `look` with the first decoding call to each operator in `HOT`."""
    namespace = torch.ops.vllm

    def replace(name: str, packet: Any) -> None:
        def call(first: Tensor, *args: Any, **kwargs: Any) -> Any:
            if len(first) == len(PROMPTS):
                setattr(namespace, name, packet)
                look(packet, (first, *args), kwargs)
            return packet(first, *args, **kwargs)

        setattr(namespace, name, call)

    for name in (OpName.parse(qualified).name for qualified in HOT):
        replace(name, getattr(namespace, name))


def token_time(llm: Any) -> float:
    """Return the CPU time in microseconds for decoding one token of each request."""
    start = time.thread_time()
    decode(llm)
    return (time.thread_time() - start) / TOKENS * 1e6


def problems_of(way: str, report: dict[str, Any], expected: list[Any]) -> list[str]:
    problems = []
    if report["tokens"] != expected:
        problems.append(f"{way}: other tokens or log-probabilities than unchanged vLLM")
    for name, calls in report["calls"].items():
        native, total = calls.get("native", 0), sum(calls.values())
        print(f"  {way:12} {name:42} native {native} / {total}", flush=True)
        if native != total or native < LAYERS * TOKENS:
            problems.append(f"{way}: of {total} calls to {name}, {native} were native: {calls}")
    return problems


def reports_of(model: str, *, compiled: bool) -> dict[str, dict[str, Any]]:
    """Run vLLM in each of the three ways, in processes with separate caches. Return the reports."""
    reports = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            caches = {"VLLM_CACHE_ROOT": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
            arguments = ["--way", way, "--model", model, "--report", str(report)]
            subprocess.run(
                [sys.executable, __file__, *arguments, *["--compiled"] * compiled],
                env={**os.environ, **ENVIRONMENT, **caches},
                check=True,
            )
            reports[way] = json.loads(report.read_text())
    return reports


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=WAYS, help="run in this process, and write the report")
    parser.add_argument("--model")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    if options.way is not None:
        warnings.simplefilter("ignore")
        report = run(options.way, options.model, compiled=options.compiled)
        options.report.write_text(json.dumps(report))
        return 0
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as model:
        write_model(Path(model))
        for compiled in (False, True):
            print("compiled" if compiled else "eager", flush=True)
            reports = reports_of(model, compiled=compiled)
            expected = reports["plain"]["tokens"]
            for way in WAYS:
                problems += problems_of(way, reports[way], expected)
            for row in reports["plain"].get("times", ()):
                print(f"  {row}")
    print("\n".join(problems) or "all tokens are equal, and all calls to attention are native")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
