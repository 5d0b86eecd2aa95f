"""Every memory-bound operation has an authored form that is right when compiled: no call is left to the library."""

from __future__ import annotations

from types import ModuleType

import pytest

from agent_synthesis.emit.registry import INCLUDE_DIRECTORY
from agent_synthesis.plans import moves
from warpsmith.v1 import analysis_pb2, task_pb2

MODULE = """
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x, y, t, i, m, v):
        return {forward}


def get_inputs():
    return [torch.randn(6, 10), torch.randn(6, 10), torch.randint(0, 10, (6,)), torch.randn(4, 6, 5, 8),
            torch.randn(6, 10) > 0, torch.randn(10)]


def get_init_inputs():
    return []
"""
EXPRESSIONS = {
    "cross-entropy of each sample": "F.cross_entropy(x, t, reduction='none')",
    "cross-entropy, smoothed": "F.cross_entropy(x, t, reduction='none', label_smoothing=0.1)",
    "cross-entropy, ignoring a class": "F.cross_entropy(x, t, reduction='none', ignore_index=3)",
    "cross-entropy, weighted": "F.cross_entropy(x, t, v.abs(), reduction='none')",
    "cross-entropy with probabilities": "F.cross_entropy(x, y.softmax(1), reduction='none')",
    "cross-entropy of images": "F.cross_entropy(i, (i[:, 0] > 0).long(), reduction='none')",
    "negative log-likelihood": "F.nll_loss(x, t, reduction='none')",
    "cross-entropy": "F.cross_entropy(x, t)",
    "cross-entropy, weighted mean": "F.cross_entropy(x, t, v.abs(), ignore_index=2, label_smoothing=0.2)",
    "cross-entropy, sum": "F.cross_entropy(x * 2, t, reduction='sum')",
    "cross-entropy of images, mean": "F.cross_entropy(i, (i[:, 0] > 0).long(), ignore_index=1)",
    "cross-entropy with probabilities, mean": "F.cross_entropy(x, y.softmax(1), label_smoothing=0.1)",
    "negative log-likelihood, mean": "F.nll_loss(x.log_softmax(1), t)",
    "triplet margin": "F.triplet_margin_loss(x, y, x * y, margin=0.5)",
    "cosine embedding, mean": "F.cosine_embedding_loss(x, y, t.sign() * 2 - 1)",
    "divergence": "F.kl_div(x.log_softmax(1), y.softmax(1), reduction='batchmean')",
    "divergence of logarithms": "F.kl_div(x.log_softmax(1), y.log_softmax(1), log_target=True, reduction='sum')",
    "Huber": "F.huber_loss(x, y, delta=0.5)",
    "smooth L1": "F.smooth_l1_loss(x, y, reduction='sum')",
    "binary cross-entropy": "F.binary_cross_entropy_with_logits(x, y.sigmoid())",
    "hinge embedding": "F.hinge_embedding_loss(x, y.sign())",
    "margin ranking": "F.margin_ranking_loss(x, y, (x - y).sign(), margin=0.2)",
    "triplet margin of each sample": "F.triplet_margin_loss(x, y, x * y, reduction='none')",
    "cosine embedding": "F.cosine_embedding_loss(x, y, t.sign() * 2 - 1, reduction='none')",
    "cosine similarity": "F.cosine_similarity(x, y)",
    "Frobenius norm": "torch.norm(x)",
    "norm of order 3": "torch.norm(x, p=3, dim=1)",
    "norm of order 1.5": "torch.linalg.vector_norm(x, 1.5)",
    "norm of order 0": "torch.linalg.vector_norm(torch.relu(x), 0, dim=0)",
    "product": "x.prod(1)",
    "variance": "x.var(1, correction=0)",
    "deviation of all": "x.std()",
    "logarithm of a sum of exponentials": "x.logsumexp((0, 1))",
    "any": "m.any(1)",
    "all": "(x > -9).all()",
    "product of complex numbers": "torch.complex(x, y) * torch.view_as_complex(i.reshape(8, 6, 10, 2))[1]",
    "turned pairs": "torch.view_as_real(torch.view_as_complex(x.reshape(6, 5, 2)) * torch.polar(v[:5], v[5:])) + 1",
    "length of complex numbers": "torch.complex(x, y).abs()",
    "masked fill": "x.masked_fill(m, -1e9)",
    "choice": "torch.where(m, x, y)",
    "gather": "x.gather(1, (y.abs() * 3).long().clamp(max=9))",
    "gather from what is computed": "(x * y).exp().gather(0, (y.abs() * 2).long().clamp(max=5))",
    "index select": "x.index_select(1, t)",
    "negative index": "x[:, -1 - t]",
    "two indices": "i[:, t.clamp(max=5), t.clamp(max=4)]",
    "embedding": "F.embedding(t, i.reshape(10, 96))",
    "flip": "x.flip(1)",
    "roll": "x.roll((3, -1), (1, 0))",
    "concatenation": "torch.cat([x, y.exp(), x[:, :3]], 1)",
    "stack": "torch.stack([x, y * 2], 1)",
    "zero pad": "F.pad(i, (1, 2, 0, 3))",
    "pad and crop": "F.pad(i, (-1, 2, 3, -2), value=2.0)",
    "reflection pad": "F.pad(i, (2, 1, 1, 2), mode='reflect')",
    "replication pad": "F.pad(i, (2, 1, 1, 2), mode='replicate')",
    "softmax of a padded tensor": "F.pad(x, (1, 1), value=float('-inf')).softmax(1)",
    "nearest": "F.interpolate(i, scale_factor=2)",
    "linear": "F.interpolate(i[0], size=13, mode='linear')",
    "bilinear": "F.interpolate(i, size=(9, 3), mode='bilinear')",
    "bilinear between corners": "F.interpolate(i, scale_factor=1.7, mode='bilinear', align_corners=True)",
    "trilinear": "F.interpolate(i[None], size=(9, 3, 8), mode='trilinear')",
    "bicubic": "F.interpolate(i, scale_factor=2, mode='bicubic')",
    "means of windows of several sizes": "F.adaptive_avg_pool2d(i, (3, 5))",
    "extremes of windows of several sizes": "F.adaptive_max_pool2d(i, (3, 5))",
    "clamp by tensors": "x.clamp(min=-y.abs(), max=y.abs())",
    "sum in the logarithm": "torch.logaddexp(x, y)",
    "pixel shuffle": "F.pixel_shuffle(i[:, :4], 2)",
    "patches": "F.unfold(i, (2, 3), dilation=2, padding=(1, 2), stride=(1, 2))",
    "patches in windows of one image": "F.unfold(i[0], 3, padding=1).softmax(0)",
    "patches added up": "F.fold(F.unfold(i, 3, padding=1, stride=2) * 2, (5, 8), 3, padding=1, stride=2)",
    "patches added up, apart": "F.fold(x, (4, 6), (3, 2), (2, 1), (2, 0), (3, 1))",
    "one hot": "F.one_hot(t, 10) * x",
    "gated": "F.glu(x)",
}
LAYERS = {
    "batch norm in training": ("nn.BatchNorm2d(6)", "i"),
    "batch norm of vectors": ("nn.BatchNorm1d(10, momentum=0.3)", "x"),
    "batch norm in evaluation": ("nn.BatchNorm2d(6).eval()", "i"),
    "batch norm without statistics": ("nn.BatchNorm2d(6, track_running_stats=False)", "i"),
    "instance norm": ("nn.InstanceNorm2d(6, affine=True)", "i"),
    "group norm": ("nn.GroupNorm(3, 6)", "i"),
    "layer norm": ("nn.LayerNorm([5, 8])", "i"),
    "RMS norm": ("nn.RMSNorm(8)", "i"),
}
TEXTS = {name: MODULE.format(init="pass", forward=text) for name, text in EXPRESSIONS.items()} | {
    name: MODULE.format(init=f"self.layer = {layer}", forward=f"self.layer({value})")
    for name, (layer, value) in LAYERS.items()
}


@pytest.mark.filterwarnings("ignore")  # PyTorch's about what modules do
def test_each_operation_has_an_authored_form_that_is_right(checking: ModuleType) -> None:
    made = {name: checking.make(text) for name, text in TEXTS.items()}
    left = {
        name: [step.library.target for step in each.program.steps if step.WhichOneof("kind") == "library"]
        for name, each in made.items()
    }
    # Views run in the library where an output or a kernel needs them: they compute nothing.
    calls = {name: targets for name, targets in left.items() if any(map(_computes, targets))}
    assert not calls
    outcomes = dict(zip(made, checking.outcomes(list(made.values())), strict=True))
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome.kind not in ("fused", "unfused")}
    assert not wrong


@pytest.mark.filterwarnings("ignore")
def test_the_cuda_of_lookups_and_of_statistics_compiles(checking: ModuleType) -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as missing:
        pytest.skip(str(missing))
    made = [checking.make(text, None, task_pb2.TARGET_CUDA).program for text in TEXTS.values()]
    texts = {id(program): program.sources[0].text for program in made if program.sources}
    programs = [p for p in made if any(word in texts.get(id(p), "") for word in ("gather(", "running_mean"))][::2]
    assert len(programs) > 10
    headers = sorted(INCLUDE_DIRECTORY.glob("*.cuh"))
    contents, names = [path.read_bytes() for path in headers], [path.name.encode() for path in headers]
    text = checking.unit_text(programs).encode()
    _, program = nvrtc.nvrtcCreateProgram(text, b"breadth.cu", len(headers), contents, names)
    options = [b"--gpu-architecture=sm_90a", b"--std=c++20"]
    (outcome,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    assert int(outcome) == 0, log.decode()
    nvrtc.nvrtcDestroyProgram(program)


def _computes(target: str) -> bool:
    return target.split(".")[1] not in ("view", "reshape", "slice", "select", "unsqueeze", "detach", "expand", "alias")


@pytest.mark.filterwarnings("ignore")
def test_a_batch_norm_in_training_writes_its_statistics_back(checking: ModuleType) -> None:
    made = checking.make(TEXTS["batch norm in training"])
    written = {name for step in made.program.steps for name in step.launch.writes}
    sources = {s.name: s.qualified_name for s in made.plan.index.graph.sources}
    assert {sources[name] for name in written & sources.keys()} >= {"layer.running_mean", "layer.running_var"}


@pytest.mark.filterwarnings("ignore")
def test_a_group_that_writes_statistics_is_never_computed_twice(checking: ModuleType) -> None:
    made = checking.make(TEXTS["batch norm in training"])
    owners = [group for group in made.plan.groups if any("batch_norm" in node for node in group.nodes)]
    assert len(owners) == 1
    assert not any("batch_norm" in node for group in made.plan.groups for node in group.recomputed)
    assert all(isinstance(move, analysis_pb2.LegalMove) for move in moves.legal(made.plan))
