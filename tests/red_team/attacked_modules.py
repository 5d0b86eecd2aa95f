"""The modules that drawn attacks pretend to compute: small, but each long enough for work left out to show in its time.

The one idea: a reference is a text, as a user writes it; an attack contains the same class as `Honest` and does by it
what it has to do honestly. `ROWS` in a text is what a target needs to be busy for some hundred microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS = {"cpu": "256", "cuda": "16384"}


@dataclass(frozen=True)
class Reference:
    """A module by name."""

    name: str
    body: str
    """Of `Model`: `__init__` and `forward`, not indented."""
    inputs: str
    """What `get_inputs` returns."""
    constructor: str = "[]"
    """What `get_init_inputs` returns."""
    has_parameters: bool = False

    def text(self, target: str) -> str:
        """As a user's file."""
        return (
            f"import torch\n{self._class('Model')}def get_inputs():\n    return {self.inputs}\n"
            f"def get_init_inputs():\n    return {self.constructor}\n"
        ).replace("ROWS", ROWS[target])

    def honest(self, target: str) -> str:
        """Its class under another name, for an attack's file."""
        return self._class("Honest").replace("ROWS", ROWS[target])

    def _class(self, name: str) -> str:
        lines = "".join(f"    {line}\n" for line in self.body.strip().splitlines())
        return f"class {name}(torch.nn.Module):\n{lines}"


def _with(member: str, forward: str) -> str:
    return f"def __init__(self):\n    super().__init__()\n    {member}\ndef forward(self, x):\n" + "".join(
        f"    {line}\n" for line in forward.splitlines()
    )


REFERENCES = (
    Reference(
        "softmax of rows",
        "def forward(self, x):\n    return torch.softmax(x, dim=-1)",
        "[torch.rand(ROWS, 2048)]",
    ),
    Reference(
        "linear, then gelu",
        _with("self.linear = torch.nn.Linear(512, 512)", "return torch.nn.functional.gelu(self.linear(x))"),
        "[torch.rand(ROWS, 512)]",
        has_parameters=True,
    ),
    Reference(
        "layer norm of ones and zeros",
        _with("self.norm = torch.nn.LayerNorm(1024)", "return self.norm(x) * self.norm(x * 2)"),
        "[torch.rand(ROWS, 1024)]",
        has_parameters=True,
    ),
    Reference(
        "a long chain",
        "def forward(self, x):\n    for _ in range(12):\n        x = x + 0.02 * torch.sin(x * 3)\n    return x",
        "[torch.rand(ROWS, 256)]",
    ),
    Reference(
        "rows of an embedding",
        _with("self.table = torch.nn.Embedding(1000, 64)", "return torch.tanh(self.table(x)) * 2"),
        "[torch.randint(0, 1000, (ROWS, 64))]",
        has_parameters=True,
    ),
    Reference(
        "a mask",
        "def forward(self, x, mask):\n    return torch.softmax(x.masked_fill(mask, -1e4), dim=-1)",
        "[torch.rand(ROWS, 1024), torch.rand(ROWS, 1024) > 0.7]",
    ),
    Reference(
        "a dict of two",
        "def forward(self, x):\n    return {'mean': torch.tanh(x).mean(-1), 'spread': torch.sin(x).std(-1)}",
        "[torch.rand(ROWS, 1024)]",
    ),
    Reference(
        "a tuple of two",
        "def forward(self, x):\n    return torch.cumsum(x, -1), torch.cos(x) * x",
        "[torch.rand(ROWS, 1024)]",
    ),
    Reference(
        "batch norm in training",
        _with("self.norm = torch.nn.BatchNorm1d(64)", "return torch.tanh(self.norm(x))"),
        "[torch.rand(ROWS, 64, 32)]",
        has_parameters=True,
    ),
    Reference(
        "a product",
        "def forward(self, a, b):\n    return a @ b",
        "[torch.rand(ROWS, 512), torch.rand(512, 512)]",
    ),
    Reference(
        "one number",
        "def forward(self, x, y):\n    return (torch.sin(x) - y).square().mean()",
        "[torch.rand(ROWS, 1024), torch.rand(ROWS, 1024)]",
    ),
    Reference(
        "a convolution",
        _with("self.convolution = torch.nn.Conv1d(16, 32, 5)", "return torch.relu(self.convolution(x))"),
        "[torch.rand(8, 16, 4 * ROWS)]",
        has_parameters=True,
    ),
    Reference(
        "an outer product",
        "def forward(self, a, b):\n    return torch.outer(a, b)",
        "[torch.rand(8 * ROWS), torch.rand(1024)]",
    ),
    Reference(
        "what is rarely true",
        "def forward(self, x):\n    return torch.cos(torch.exp(x) * 3) > 0.99999",
        "[torch.rand(ROWS, 2048)]",
    ),
    Reference(
        "means in 16 bits",
        "def forward(self, x):\n    return torch.tanh(x).mean(-1)",
        "[(torch.rand(ROWS, 4096) * torch.rand(ROWS, 1)).bfloat16()]",
    ),
    Reference(
        "sums in 16 bits",
        "def forward(self, x):\n    return torch.tanh(x).sum(-1)",
        "[torch.randn(ROWS, 4096).bfloat16()]",
    ),
    Reference(
        "products in 16 bits",
        "def forward(self, x):\n    return x @ x[:256].t()",
        "[torch.rand(ROWS, 4096).bfloat16()]",
    ),
    Reference(
        "a gate of zeros",
        _with("self.gate = torch.nn.Parameter(torch.zeros(512))", "return x + self.gate * torch.sin(x.exp()).cos()"),
        "[torch.rand(ROWS, 512)]",
        has_parameters=True,
    ),
)
