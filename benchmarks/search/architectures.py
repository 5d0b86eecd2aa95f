"""Whether networks that nobody here has named are taken: captured, planned as a whole, right, and compiled.

    python -m benchmarks.search.architectures timm --out timm.jsonl [--only NAME ...] [--compile] [--seconds 120]
    python -m benchmarks.search.architectures transformers --out transformers.jsonl

Architectures of a package, without weights: of timm the smallest and a middle one of each family, of transformers
each configuration, with few and narrow layers. A module's whole plan for an H200 (a layout for all, kernels beside
products) is computed by what its kernels mean and compared with what PyTorch gives in the same types; `--compile`
has NVRTC compile it. Nothing is timed; needs no GPU. A file is gone on with: what it has is not done again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import re
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from agent_compile.compiler import Compiler
from agent_compile.toolchains.nvrtc import Nvrtc
from agent_compile.toolchains.toolchain import Rejected
from agent_synthesis.generator import generate
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests.interpreter import run_plan
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import plan_zero
from benchmarks.search.whole_plans import MOVES
from warpsmith.errors import IllegalMove
from warpsmith.graphs import aten
from warpsmith.graphs.capture import capture
from warpsmith.v1 import graph_pb2, task_pb2

Made = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]
"""A module and what it is called with."""
TOLERANCE = 1e-3
"""Largest error relative to the output (Frobenius): sums in another order, through dozens of layers, stay below."""
MOST_PARAMETERS = 250_000_000
_SMALL_WORDS = ("tiny", "nano", "atto", "pico", "femto", "small", "18", "b0", "xs", "_s")
_SMALL = {
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embed_dim": 64, "embedding_size": 64,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "intermediate_size": 128, "ffn_dim": 128, "d_ff": 128,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "d_kv": 16, "vocab_size": 97, "max_position_embeddings": 64,
    "n_positions": 64, "image_size": 32, "patch_size": 8, "num_local_experts": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 4, "q_lora_rank": 32,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "state_size": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Settings of a configuration of transformers, where it has them."""


class _Late(Exception):
    """The time of a network is over."""


def main() -> None:
    """Sweeps a package and prints the tally."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=sorted(_PACKAGES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--compile", action="store_true", dest="compiles")
    parser.add_argument("--seconds", type=int, default=120, help="for one network")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    known = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    done = {row["name"] for row in known}
    compiler = Compiler([Nvrtc()], None) if asked.compiles else None
    with contextlib.closing(compiler) if compiler else contextlib.nullcontext(), asked.out.open("a") as out:
        for name, make in _PACKAGES[asked.package]():
            if name in done or (asked.only and name not in asked.only):
                continue
            row = {"name": name, **_within(asked.seconds, make, compiler)}
            known.append(row)
            print(json.dumps(row), file=out, flush=True)
            print(f"{name}: {row.get('failed') or row.get('skipped') or 'right'}", flush=True)
    print(tally(known))


def tally(rows: list[dict[str, Any]]) -> str:
    """How many were right, and what became of the others."""
    found = Counter("failed" if "failed" in row else "skipped" if "skipped" in row else "right" for row in rows)
    lines = [
        f"{len(rows)} architectures: " + ", ".join(f"{found[each]} {each}" for each in ("right", "skipped", "failed"))
    ]
    lines += [f"  {row['name']}: {row['failed']}" for row in rows if "failed" in row]
    return "\n".join(lines)


def _within(seconds: int, make: Callable[[], Made], compiler: Compiler | None) -> dict[str, Any]:
    """What became of a network. Skipped is what its own package or `torch.export` does not take, and what is late."""

    def late(*_: object) -> None:
        raise _Late(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    begin = time.perf_counter()
    row: dict[str, Any] = {}
    try:
        try:
            module, inputs = make()
            if sum(parameter.numel() for parameter in module.parameters()) > MOST_PARAMETERS:
                return {"skipped": "too large"}
            with torch.no_grad():
                module(*inputs)
        except Exception as error:
            return {"skipped": f"not built: {_said(error)}"}
        row |= {"training": module.training, **checked(module, inputs, compiler)}
    except _Late as error:
        row["skipped"] = str(error)
    except Exception as error:
        row["failed"] = f"{_said(error)} ({traceback.extract_tb(error.__traceback__)[-1].name})"
        with contextlib.suppress(_Late):
            try:
                torch.export.export(module, inputs, strict=False)
            except _Late:
                raise
            except Exception as refused:
                del row["failed"]
                row["skipped"] = f"torch.export: {_said(refused)}"
    finally:
        signal.alarm(0)
    return {**row, "seconds": round(time.perf_counter() - begin, 1)}


def checked(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], compiler: Compiler | None) -> dict[str, Any]:
    """Captures and plans a network, and says how far its plan's results are from PyTorch's."""
    graph = capture(module, inputs)
    sources = _sources(graph, module, inputs)
    torch.manual_seed(0)
    expected = aten.interpret(graph, {name: tensor.clone() for name, tensor in sources.items()})
    plan = plan_zero(GraphIndex(graph), task_pb2.TARGET_CUDA)
    for move in MOVES:
        with contextlib.suppress(IllegalMove):
            plan = moves.apply(plan, move)
    row: dict[str, Any] = {
        "operations": len(graph.nodes),
        "kernels": sum(group.engine == "authored" for group in plan.groups),
    }
    torch.manual_seed(0)
    given = run_plan(plan, {name: tensor.clone() for name, tensor in sources.items()})
    row["error"] = max(_far(own, expected[name]) for own, name in zip(given, graph.outputs, strict=True))
    if not row["error"] <= TOLERANCE:
        row["failed"] = f"wrong by {row['error']:.2g}"
    elif compiler is not None:
        outcome = compiler.compile(generate(plan)).outcome
        if isinstance(outcome, Rejected):
            row["failed"] = f"does not compile: {outcome.diagnostics[:300]}"
    return row


def _sources(
    graph: graph_pb2.Graph, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
) -> dict[str, torch.Tensor]:
    members = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    found = {}
    for source in graph.sources:
        if source.origin == graph_pb2.ORIGIN_INPUT:
            found[source.name] = inputs[source.input_index]
        elif source.origin == graph_pb2.ORIGIN_CONSTANT:
            found[source.name] = aten.constant(source, torch.device("cpu"))
        else:
            found[source.name] = members[source.qualified_name].detach()
    return found


def _far(given: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.is_floating_point():
        return float((given != expected).any())
    off = (given.double() - expected.double()).norm()
    return float(off / expected.double().norm().clamp(min=1e-30)) if float(off) else 0.0


def _said(error: BaseException) -> str:
    """Without the folders of this machine."""
    text = re.sub(r"/[^\s'\"]+/", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:200]}"


def _of_timm() -> Iterator[tuple[str, Callable[[], Made]]]:
    _let_torchvision_in()
    timm: Any = importlib.import_module("timm")
    for family in timm.list_modules():
        names = sorted(timm.list_models(module=family))
        smallest = sorted(names, key=lambda n: (not any(word in n for word in _SMALL_WORDS), len(n), n))
        for number, name in enumerate(dict.fromkeys([*smallest[:1], *names[len(names) // 2 :][:1]])):

            def make(name: str = name, trains: bool = bool(number)) -> Made:
                module = timm.create_model(name, pretrained=False)
                size = module.pretrained_cfg.get("input_size", (3, 224, 224))
                return module.train(trains), (torch.randn(2, *size),)

            yield name, make


def _let_torchvision_in() -> None:
    """torchvision's package on PyPI is built for CUDA; beside a PyTorch for processors its operators are missing, for
    which it asks as it is imported."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        kinds = ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d")
        for name in ("nms", "qnms", *kinds, *(f"_{kind}_backward" for kind in kinds)):
            library.define(f"{name}(Tensor x) -> Tensor")
        _libraries.append(library)


_libraries: list[Any] = []
"""Kept: what they define goes with them."""


def _of_transformers() -> Iterator[tuple[str, Callable[[], Made]]]:
    _let_torchvision_in()
    transformers: Any = importlib.import_module("transformers")
    for name in transformers.CONFIG_MAPPING:

        def make(name: str = name) -> Made:
            configuration = transformers.CONFIG_MAPPING[name]
            settings = {*inspect.signature(configuration.__init__).parameters, *configuration.attribute_map}
            settings |= set(getattr(configuration, "__dataclass_fields__", ()))
            config = configuration(**{key: value for key, value in _SMALL.items() if key in settings})
            with torch.device("meta"):
                size = sum(p.numel() for p in transformers.AutoModel.from_config(config).parameters())
            if size > MOST_PARAMETERS // 8:
                raise ValueError("has large parts whatever it is set to")
            module = _Called(transformers.AutoModel.from_config(config).eval())
            return module, (module.example(config),)

        yield name, make


class _Called(torch.nn.Module):
    """A model of transformers, called with one tensor; its first result."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        names = inspect.signature(model.forward).parameters
        self.names = ["input_ids"] if "input_ids" in names else ["pixel_values"]
        if "decoder_input_ids" in names and self.names == ["input_ids"]:
            self.names.append("decoder_input_ids")
        self.settings = {"use_cache": False} if "use_cache" in names else {}

    def example(self, config: Any) -> torch.Tensor:
        """What it can be called with."""
        if self.names[0] == "input_ids":
            return torch.randint(3, 90, (2, 16))
        size = config.image_size if isinstance(getattr(config, "image_size", None), int) else 64
        return torch.randn(2, 3, size, size)

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(**dict.fromkeys(self.names, x), **self.settings)[0]


_PACKAGES = {"timm": _of_timm, "transformers": _of_transformers}

if __name__ == "__main__":
    main()
