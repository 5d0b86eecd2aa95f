"""Runs KernelBench's own static checker and harness, unmodified, on an export of the flavour `kernelbench`.

    python -m benchmarks.kernelbench.kernelbench_harness KERNELBENCH EXPORT.py MODULE.py [--static]

KERNELBENCH is a checkout of https://github.com/ScalingIntelligence/KernelBench with its requirements installed,
MODULE.py the file that was optimised. Prints the verdict as one line of JSON; exit code 0 when all that ran accepts the
export. The harness needs a GPU, nvcc and ninja; --static runs the checker alone, which needs Python only. Beside the
harness's verdict stands how far eager and the export are from fp64: where eager alone misses 1e-4, no honest kernel can
agree with it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

CORRECT_TRIALS, PERF_TRIALS = 5, 100
TOLERANCE = 1e-4
"""The harness's own for fp32, absolute and relative."""


def check(sources: Path, text: str) -> dict[str, Any]:
    """The static checker's answer; its file is loaded alone, because it imports nothing but the standard library."""
    spec = importlib.util.spec_from_file_location("kernel_static_checker", sources / "kernel_static_checker.py")
    assert spec is not None
    assert spec.loader is not None
    checker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checker)
    valid, errors, warnings = checker.validate_kernel_static(text, backend="cuda", precision="fp32")
    return {"valid": valid, "errors": errors, "warnings": sorted(warnings)}


def evaluate(export: str, module: str) -> dict[str, Any]:
    """The harness's answer: `kernelbench.eval.eval_kernel_against_ref` with performance measured."""
    with contextlib.redirect_stdout(sys.stderr):  # the harness talks; stdout is for the verdict
        harness = importlib.import_module("kernelbench.eval")
        result = harness.eval_kernel_against_ref(
            module,
            export,
            num_correct_trials=CORRECT_TRIALS,
            num_perf_trials=PERF_TRIALS,
            measure_performance=True,
            backend="cuda",
        )
    if result is None:
        return {"compiled": False, "correctness": False, "metadata": "the harness asks for another try"}
    found = {"compiled": result.compiled, "correctness": result.correctness}
    if result.runtime > 0:
        found["milliseconds"] = {"export": result.runtime_stats, "eager": result.ref_runtime_stats}
        found["speedup"] = round(result.ref_runtime / result.runtime, 3)
    return found | {"metadata": {name: str(value) for name, value in result.metadata.items()}}


def distances(export: str, module: str) -> dict[str, Any]:
    """How far eager and the export are from fp64 on the inputs of the harness's first trials, and from each other."""
    import torch

    harness = importlib.import_module("kernelbench.eval")
    namespace: dict[str, Any] = {}
    reference, get_init_inputs, get_inputs = harness.load_original_model_and_inputs(module, namespace)
    made = harness.load_custom_model(export, namespace)
    models = []
    for kind in (reference, made, reference):
        harness.set_seed(42)
        models.append(kind(*get_init_inputs()).cuda())
    eager, ours, exact = models[0], models[1], models[2].double()
    worst = {"eager_from_fp64": 0.0, "export_from_fp64": 0.0, "export_from_eager": 0.0}
    agree = dict.fromkeys(worst, 0)
    torch.manual_seed(42)
    for seed in [int(torch.randint(0, 2**32 - 1, (1,)).item()) for _ in range(CORRECT_TRIALS)]:
        harness.set_seed(seed)
        inputs = [value.cuda() for value in get_inputs()]
        with torch.no_grad():
            truth = exact(*[value.double() for value in inputs])
            outputs = {"eager": eager(*inputs).double(), "export": ours(*inputs).double(), "fp64": truth}
        for name, largest in worst.items():
            left, right = (outputs[part] for part in name.split("_from_"))
            worst[name] = max(largest, float((left - right).abs().max()))
            agree[name] += torch.allclose(right, left, atol=TOLERANCE, rtol=TOLERANCE)
    return {
        "trials": CORRECT_TRIALS,
        "largest_difference": worst,
        "trials_within_tolerance": agree,
        "largest_output": float(truth.abs().max()),
    }


def environment() -> dict[str, str]:
    """What it ran on."""
    import torch

    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}


def main() -> int:
    """Prints the verdict; 0 accepted, 1 refused, 2 the harness cannot run here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernelbench", type=Path, help="a checkout of KernelBench")
    parser.add_argument("export", type=Path, help="what warpsmith export --flavour kernelbench wrote")
    parser.add_argument("module", type=Path, help="the module in KernelBench's format")
    parser.add_argument("--static", action="store_true", help="only the static checker")
    options = parser.parse_args()
    sources = options.kernelbench / "src"
    export, module = options.export.read_text(), options.module.read_text()
    verdict: dict[str, Any] = {"module": options.module.stem, "static": check(sources / "kernelbench", export)}
    accepted = verdict["static"]["valid"]
    if not options.static:
        sys.path.insert(0, str(sources.resolve()))
        try:
            verdict["harness"] = evaluate(export, module)
            verdict["fp64"] = distances(export, module)
            verdict["environment"] = environment()
        except ImportError as error:
            print(json.dumps(verdict))
            print(f"KernelBench's harness does not import: {error}; install its requirements", file=sys.stderr)
            return 2
        accepted = accepted and verdict["harness"]["correctness"]
    print(json.dumps(verdict))
    return 0 if accepted else 1


if __name__ == "__main__":
    sys.exit(main())
