"""The suite `models`: architectures that people run, without weights, each one file in two element types.

The one idea: an architecture is a few lines of Python around a package's own public class, so a module of the suite is
written out as a file that anybody can read, change and give to `warpsmith optimize`. It optimises nothing.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from warpsmith.errors import BadInput
from warpsmith.sandbox import private_files

DTYPES: Final = ("float32", "bfloat16")
"""Each architecture comes in these."""


@dataclass(frozen=True)
class Architecture:
    """One module of the suite."""

    name: str
    """Of its files."""
    package: str
    """Where its class is from; "torch" for what is written here."""
    imports: str
    """The line that imports it."""
    build: str
    """Makes it."""
    call: str
    """Its result on `x`, with `self.model`."""
    shape: tuple[int, ...]
    """Of `x`."""
    draws: str = ""
    """A parameter that the package begins with zeros, so that the whole result is zero: it is drawn, as others are."""
    is_image: bool = False
    """Whether `x` is smooth, as photographs are. Networks average white noise away, and in bf16 what random weights
    make of one image is then no farther from what they make of another than from their result in float64."""

    def text(self, dtype: str) -> str:
        """The file, in KernelBench's format."""
        sizes, small = ", ".join(map(str, self.shape)), ", ".join(map(str, (*self.shape[:2], 7, 7)))
        drawn = f"torch.randn({sizes}, dtype=torch.{dtype})"
        if self.is_image:
            smooth = f'torch.randn({small}), {self.shape[2:]}, mode="bicubic"'
            drawn = f"torch.nn.functional.interpolate({smooth}).to(torch.{dtype})"
        draw = f"\n        torch.nn.init.normal_(self.model.{self.draws}, std=0.02)" if self.draws else ""
        return f'''"""{self.name} in {dtype}: an architecture of {self.package}, weights drawn at random."""

import torch
{self.imports}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = {self.build}{draw}
        self.to(torch.{dtype}).eval()

    def forward(self, x):
        return {self.call}


def get_inputs():
    return [{drawn}]


def get_init_inputs():
    return []
'''


_EMBEDDED: Final = "self.model(inputs_embeds=x, use_cache=False)[0]"
_UNET_BLOCK: Final = """
class Block(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.GroupNorm(32, channels) for _ in range(2))
        self.convolutions = torch.nn.ModuleList(torch.nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x):
        y = x
        for norm, convolution in zip(self.norms, self.convolutions):
            y = convolution(torch.nn.functional.silu(norm(y)))
        return x + y"""


def _layers(name: str, model: str, settings: str, shape: tuple[int, ...], call: str = _EMBEDDED) -> Architecture:
    """One layer of a transformer with what stands around it: positions, masks, the last norm. No table of words."""
    config = model.removesuffix("EncoderModel").removesuffix("Model") + "Config"
    lines = "".join(f"                {setting},\n" for setting in ("vocab_size=8", *settings.split(", ")))
    build = f"{model}(\n            {config}(\n{lines}            )\n        )"
    return Architecture(name, "transformers", f"from transformers import {config}, {model}", build, call, shape)


def _vision(name: str, draws: str = "") -> Architecture:
    imports, build = "from torchvision import models", f"models.{name}(weights=None)"
    return Architecture(name, "torchvision", imports, build, "self.model(x)", (64, 3, 224, 224), draws, is_image=True)


_TEXT: Final = (2, 2048)
_SPECIAL: Final = "bos_token_id=0, eos_token_id=0, pad_token_id=0"

ARCHITECTURES: Final = (
    _layers("gpt2_layer", "GPT2Model", f"n_layer=1, n_positions=2048, {_SPECIAL}", (*_TEXT, 768)),
    _layers(
        "llama_layer",
        "LlamaModel",
        "num_hidden_layers=1, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, "
        f"num_key_value_heads=8, {_SPECIAL}",
        (*_TEXT, 4096),
    ),
    _layers(
        "qwen3_layer",
        "Qwen3Model",
        "num_hidden_layers=1, hidden_size=2560, intermediate_size=9728, num_attention_heads=32, "
        f"num_key_value_heads=8, head_dim=128, {_SPECIAL}",
        (*_TEXT, 2560),
    ),
    _layers(
        "bert_layer",
        "BertModel",
        "num_hidden_layers=1, pad_token_id=0",
        (16, 512, 768),
        "self.model(inputs_embeds=x)[0]",
    ),
    _layers(
        "t5_layer",
        "T5EncoderModel",
        f"num_layers=1, d_model=1024, d_ff=4096, num_heads=16, {_SPECIAL}",
        (16, 512, 1024),
        "self.model(inputs_embeds=x)[0]",
    ),
    Architecture(
        "whisper_encoder_layer",
        "transformers",
        "from transformers import WhisperConfig\n"
        "from transformers.models.whisper.modeling_whisper import WhisperEncoder",
        "WhisperEncoder(\n"
        "            WhisperConfig(encoder_layers=1, d_model=1024, encoder_ffn_dim=4096, encoder_attention_heads=16)\n"
        "        )",
        "self.model(x)[0]",
        (8, 80, 3000),
    ),
    _vision("resnet50"),
    _vision("convnext_tiny"),
    _vision("efficientnet_b0"),
    _vision("vit_b_16", draws="heads.head.weight"),
    Architecture(
        "swin_block",
        "torchvision",
        "from torchvision.models.swin_transformer import SwinTransformerBlock",
        "SwinTransformerBlock(96, 3, window_size=[7, 7], shift_size=[3, 3])",
        "self.model(x)",
        (64, 56, 56, 96),
    ),
    Architecture("unet_block", "torch", _UNET_BLOCK, "Block(320)", "self.model(x)", (8, 320, 64, 64)),
)
"""Everything in the suite, transformers first."""


def is_installed(package: str) -> bool:
    """Whether it can be imported here, as it seems."""
    return importlib.util.find_spec(package) is not None


def write(folder: Path) -> Path:
    """Writes the suite's files into `folder`; gives its real path.

    Raises:
        BadInput: a package is not installed (names all that are missing and how to install them), or others may change
            the folder.
    """
    packages = dict.fromkeys(each.package for each in ARCHITECTURES)
    if missing := [package for package in packages if not is_installed(package)]:
        raise BadInput(f"--suite models needs {' and '.join(missing)}: pip install 'warpsmith[models]'")
    place = private_files.directory(folder)
    for architecture in ARCHITECTURES:
        for dtype in DTYPES:
            private_files.replace(place / f"{architecture.name}_{dtype}.py", architecture.text(dtype))
    return place
