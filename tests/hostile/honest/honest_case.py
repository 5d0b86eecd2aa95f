"""An honest but unusual solution: what it does may look odd, and is right; a judge that refuses it is wrong.

The one idea: a case is a module in a few strings. Where the solution says nothing of its own, it is the reference under
KernelBench's name: what is unusual is then in both.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Honest:
    """A reference and its solution; statements are not indented. `PROCESSORS` is how many the judge has."""

    name: str
    forward: str
    """Statements of the reference's `forward`."""
    inputs: str = "[torch.rand(64, 128)]"
    """What `get_inputs` returns."""
    takes: str = "x"
    """Names of the inputs."""
    init: str = "pass"
    """Statements of the reference's constructor."""
    top: str = ""
    """Statements above the class."""
    own_forward: str = ""
    """Of the solution, where it is another; as the next three."""
    own_init: str = ""
    own_top: str = ""
    own_rest: str = ""
    """Further members of the solution's class."""
    seconds: float = 0.0
    """That it takes longer than others, for what it compiles."""

    @property
    def reference(self) -> str:
        """As a user's file."""
        given = f"def get_inputs():\n    return {self.inputs}\ndef get_init_inputs():\n    return []\n"
        return self._module("Model", self.top, self.init, self.forward, "") + given

    @property
    def solution(self) -> str:
        """As KernelBench's `ModelNew`."""
        top = "\n".join(filter(None, (self.top, self.own_top)))
        return self._module(
            "ModelNew", top, self.own_init or self.init, self.own_forward or self.forward, self.own_rest
        )

    def _module(self, name: str, top: str, init: str, forward: str, rest: str) -> str:
        return (
            f"import torch\nfrom torch import nn\nimport torch.nn.functional as F\n{top}\nclass {name}(nn.Module):\n"
            f"    def __init__(self):\n        super().__init__()\n{_indented(init, 8)}"
            f"    def forward(self, {self.takes}):\n{_indented(forward, 8)}{_indented(rest, 4)}"
        )


def _indented(statements: str, columns: int) -> str:
    return "".join(f"{' ' * columns}{line}\n" for line in statements.strip("\n").splitlines())
