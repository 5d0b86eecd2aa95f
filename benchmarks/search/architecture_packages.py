"""What packages of architectures have, as modules with random weights and what each is called with.

Of timm the smallest and a middle one of each family, of torchvision the smallest of each architecture, of transformers
each configuration, with few and narrow layers. Images are as small as a network takes.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

Made = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]
"""A module and what it is called with."""
Makers = Iterator[tuple[str, Callable[[], Made]]]
"""Names, and what makes each."""
MOST_PARAMETERS = 250_000_000
_EDGES = (64, 128, 224, 256, 384)
"""Of images, tried in this order."""
_FRAMES = 16
"""Of videos."""
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


def of_timm() -> Makers:
    """Of each family the smallest, for inference, and the middle one by name, in training mode."""
    _let_torchvision_in()
    timm: Any = importlib.import_module("timm")
    for family in timm.list_modules():
        names = sorted(timm.list_models(module=family))
        smallest = sorted(names, key=lambda n: (not any(word in n for word in _SMALL_WORDS), len(n), n))
        for number, name in enumerate(dict.fromkeys([*smallest[:1], *names[len(names) // 2 :][:1]])):

            def make(name: str = name, trains: bool = bool(number)) -> Made:
                module, inputs = _with_small_images(lambda **size: timm.create_model(name, pretrained=False, **size))
                return module.train(trains), inputs

            yield name, make


def _with_small_images(create: Callable[..., torch.nn.Module]) -> Made:
    """A module and two of the smallest images that it takes."""
    refused: Exception = ValueError("takes no images")
    for edge in _EDGES:
        images = torch.randn(2, 3, edge, edge)
        for size in ({"img_size": edge}, {}):
            try:
                with torch.device("meta"):
                    create(**size).eval()(images.to("meta"))
                module = create(**size).eval()
                with torch.no_grad():
                    module(images)
            except Exception as error:
                refused = error
            else:
                return module, (images,)
    raise refused


def of_torchvision() -> Makers:
    """The smallest of each architecture that takes images or videos of one size; of detectors none, whose results have
    as many rows as they find."""
    _let_torchvision_in()
    models: Any = importlib.import_module("torchvision").models
    families: dict[str, list[str]] = {}
    for name in models.list_models():
        families.setdefault(models.get_model_builder(name).__module__, []).append(name)
    for family, names in families.items():
        if "detection" in family or "quantization" in family:
            continue
        smallest = min(names, key=lambda n: (not any(word in n for word in _SMALL_WORDS), len(n), n))

        def make(name: str = smallest, family: str = family) -> Made:
            options = {"weights": None, "weights_backbone": None} if "segmentation" in family else {"weights": None}
            if "optical_flow" in family:
                return models.get_model(name, **options).eval(), tuple(torch.randn(2, 1, 3, 128, 128).unbind())
            if "video" in family:
                edge = 224 if "mvit" in name else 64
                return models.get_model(name, **options).eval(), (torch.randn(1, 3, _FRAMES, edge, edge),)
            return _with_small_images(lambda img_size=224: _sized(models, name, img_size, options))

        yield smallest, make


def _sized(models: Any, name: str, edge: int, options: dict[str, Any]) -> Any:
    """torchvision calls the size of images by two names, where a network has one."""
    for key in ("image_size", "input_size"):
        size = edge if key == "image_size" else (edge, edge)
        try:
            return models.get_model(name, **options, **{key: size})
        except (TypeError, ValueError):
            continue
    return models.get_model(name, **options)


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


def of_transformers() -> Makers:
    """Each configuration, with few and narrow layers."""
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


PACKAGES: dict[str, Callable[[], Makers]] = {
    "timm": of_timm,
    "torchvision": of_torchvision,
    "transformers": of_transformers,
}
"""By name."""
