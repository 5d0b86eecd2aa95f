"""Forms in which people write the cells of recurrent networks by hand, as steps of a loop in Python.

The one idea: a form is a function of a module with layers for every gate and of x [steps, rows, inputs], h and c
[rows, hidden]; what PyTorch has a call for stands apart from what it has none for, and from what only looks like one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Steps = Callable[[Any, Tensor, Tensor, Tensor], Any]


class Gates(nn.Module):
    """Layers for the gates of a cell of `hidden` units that reads `inputs` columns, and steps that use some of them."""

    def __init__(self, steps: Steps, inputs: int = 5, hidden: int = 4) -> None:
        super().__init__()
        self.steps, self.hidden, both = steps, hidden, inputs + hidden
        self.x4, self.h4, self.both4 = (
            nn.Linear(inputs, 4 * hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(both, 4 * hidden),
        )
        self.x3, self.h3, self.both3 = (
            nn.Linear(inputs, 3 * hidden),
            nn.Linear(hidden, 3 * hidden),
            nn.Linear(both, 3 * hidden),
        )
        self.x2, self.h2, self.both2 = (
            nn.Linear(inputs, 2 * hidden),
            nn.Linear(hidden, 2 * hidden),
            nn.Linear(both, 2 * hidden),
        )
        self.bare4, self.bare3 = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(hidden, 3 * hidden, bias=False)
        for gate in "ifgo":
            setattr(self, f"x{gate}", nn.Linear(inputs, hidden))
            setattr(self, f"h{gate}", nn.Linear(hidden, hidden, bias=gate != "o"))
            setattr(self, f"both_{gate}", nn.Linear(both, hidden))
        self.bias = nn.Parameter(torch.randn(4 * hidden))
        self.peep = nn.Parameter(torch.randn(3, hidden))
        self.scale = nn.Parameter(torch.rand(hidden))
        self.norm, self.norm4, self.out = nn.LayerNorm(hidden), nn.LayerNorm(4 * hidden), nn.Linear(hidden, 6)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
        return self.steps(self, x, h, c)


def args(
    steps: int = 6, rows: int = 3, inputs: int = 5, hidden: int = 4, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """Values for a form."""
    shapes = ((steps, rows, inputs), (rows, hidden), (rows, hidden))
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def written_sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


# ---- LSTM


def _lstm(
    gates: Callable[[Any, Tensor, Tensor], Tensor], order: str, sigmoid: Any = torch.sigmoid, forget: float = 0
) -> Steps:
    """One product of all gates, in an order, cut up by `chunk`; all states are stacked."""

    def steps(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
        outputs = []
        for t in range(x.shape[0]):
            cut = dict(zip(order, gates(m, x[t], h).chunk(4, dim=1), strict=True))
            f = sigmoid(cut["f"] + forget) if forget else sigmoid(cut["f"])
            c = f * c + sigmoid(cut["i"]) * torch.tanh(cut["g"])
            h = sigmoid(cut["o"]) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs), h, c

    return steps


def _beside(m: Any, x: Tensor, h: Tensor) -> Tensor:
    made: Tensor = m.both4(torch.cat([x, h], 1))
    return made


def _state_beside(m: Any, x: Tensor, h: Tensor) -> Tensor:
    weight = torch.cat([m.h4.weight, m.x4.weight], 1)
    return F.linear(torch.cat((h, x), dim=-1), weight, m.bias)


def _two(m: Any, x: Tensor, h: Tensor) -> Tensor:
    made: Tensor = m.x4(x) + m.h4(h)
    return made


def _no_biases(m: Any, x: Tensor, h: Tensor) -> Tensor:
    return x @ m.x4.weight.t() + m.bare4(h)


def _products(m: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.mm(x, m.x4.weight.t()) + torch.mm(h, m.h4.weight.t()) + m.bias


def _split_lstm(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    outputs, n = [], m.hidden
    for step in x.unbind(0):
        i, f, g, o = (m.h4(h) + m.x4(step)).split(n, 1)
        c = torch.addcmul(torch.sigmoid(i) * torch.tanh(g), torch.sigmoid(f), c)
        h = torch.tanh(c).mul(torch.sigmoid(o))
        outputs.append(m.out(h))
    return torch.stack(outputs, 1)


def _sliced_lstm(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    n, x = m.hidden, x.transpose(0, 1)
    for t in range(x.shape[1]):
        gates = m.x4(x[:, t, :]) + m.h4(h)
        ifo = torch.sigmoid(gates[:, : 3 * n])
        i, f, o = ifo[:, :n], ifo[:, n : 2 * n], ifo[:, 2 * n :]
        c = f * c + i * gates[:, 3 * n :].tanh()
        h = o * c.tanh()
    return h


def _viewed_lstm(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    for t in range(x.shape[0]):
        g = m.both4(torch.cat((x[t], h), 1)).view(-1, 4, m.hidden)
        c = torch.sigmoid(g[:, 1]) * c + torch.sigmoid(g[:, 0]) * torch.tanh(g[:, 2])
        h = torch.sigmoid(g[:, 3]) * torch.tanh(c)
    return h, c


def _interleaved_lstm(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    for t in range(x.shape[0]):
        i, f, g, o = m.both4(torch.cat((x[t], h), 1)).view(-1, m.hidden, 4).unbind(2)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
    return h, c


def _eight_layers(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    outputs = []
    for t in range(x.shape[0]):
        i, f = torch.sigmoid(m.xi(x[t]) + m.hi(h)), torch.sigmoid(m.xf(x[t]) + m.hf(h))
        g, o = torch.tanh(m.xg(x[t]) + m.hg(h)), torch.sigmoid(m.xo(x[t]) + m.ho(h))
        c = f * c + i * g
        h = o * torch.tanh(c)
        outputs.append(h.unsqueeze(1))
    return torch.cat(outputs, 1), (h, c)


def _four_layers(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    for t in range(x.shape[0]):
        both = torch.cat((h, x[t]), 1)
        weights = {gate: getattr(m, f"both_{gate}") for gate in "ifgo"}
        f, i, o = (torch.sigmoid(weights[gate](both)) for gate in "fio")
        c = c * f + torch.tanh(weights["g"](both)) * i
        h = torch.tanh(c) * o
    return m.out(h)


def _projected_lstm(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    projected, outputs = m.x4(x.transpose(0, 1)), []
    h, c = torch.zeros_like(h), torch.zeros_like(c)
    for t in range(x.shape[0]):
        i, f, g, o = (projected[:, t] + m.bare4(h)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs, 1), h


def _projected_by_gate(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    xi, xf, xg, xo = m.xi(x), m.xf(x), m.xg(x), m.xo(x)
    for t in range(x.shape[0]):
        i, f = torch.sigmoid(xi[t] + m.hi(h)), torch.sigmoid(xf[t] + m.hf(h))
        g, o = torch.tanh(xg[t] + m.hg(h)), torch.sigmoid(xo[t] + m.ho(h))
        c = f * c + i * g
        h = o * torch.tanh(c)
    return h


def _cut_before(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    """Both products cut up before they are added."""
    for t in range(x.shape[0]):
        xi, xf, xg, xo = m.x4(x[t]).chunk(4, 1)
        hi, hf, hg, ho = m.h4(h).chunk(4, 1)
        c = torch.sigmoid(xf + hf) * c + torch.sigmoid(xi + hi) * torch.tanh(xg + hg)
        h = torch.sigmoid(xo + ho) * torch.tanh(c)
    return h, c


def _coupled_lstm(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    """What is forgotten makes room for what comes (CIFG)."""
    for t in range(x.shape[0]):
        i, g, o = (m.x3(x[t]) + m.h3(h)).chunk(3, 1)
        i = torch.sigmoid(i)
        c = (1 - i) * c + i * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
    return h


def _both_directions(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    forwards = _lstm(_two, "ifgo")(m, x, h, c)[0]
    backwards = _lstm(_beside, "ifgo")(m, x.flip(0), h, c)[0].flip(0)
    return torch.cat([forwards, backwards], 2)


def _two_lstm_layers(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    below = F.linear(_lstm(_two, "ifgo")(m, x, h, c)[0], m.h4.weight[:, : m.hidden])[:, :, : x.shape[2]]
    below = F.pad(below, (0, x.shape[2] - below.shape[2]))
    return _lstm(_beside, "fiog")(m, below, h, c)[0]


# ---- GRU


def _gru(end: Callable[[Tensor, Tensor, Tensor], Tensor], order: str = "rzn") -> Steps:
    def steps(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Any:
        outputs = []
        for t in range(x.shape[0]):
            of_x, of_h = (dict(zip(order, each.chunk(3, 1), strict=True)) for each in (m.x3(x[t]), m.h3(h)))
            r, z = torch.sigmoid(of_x["r"] + of_h["r"]), torch.sigmoid(of_x["z"] + of_h["z"])
            h = end(z, torch.tanh(of_x["n"] + r * of_h["n"]), h)
            outputs.append(h)
        return torch.stack(outputs)

    return steps


def _gru_by_layers(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Any:
    for t in range(x.shape[0]):
        r, z = torch.sigmoid(m.xi(x[t]) + m.hi(h)), torch.sigmoid(m.xf(x[t]) + m.hf(h))
        h = (1 - z) * torch.tanh(m.xg(x[t]) + r * m.hg(h)) + z * h
    return h


def _gru_in_one(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Any:
    """Two gates by one layer of both, the third by layers of its own."""
    outputs = []
    for t in range(x.shape[0]):
        r, z = torch.sigmoid(m.both2(torch.cat((x[t], h), 1))).chunk(2, 1)
        h = torch.lerp(torch.tanh(m.xg(x[t]) + m.ho(h) * r), h, z)
        outputs.append(h)
    return torch.stack(outputs), h


def _gru_projected(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Any:
    projected, n = m.x3(x), m.hidden
    for t in range(x.shape[0]):
        of_h = m.bare3(h)
        r = torch.sigmoid(projected[t, :, :n] + of_h[:, :n])
        z = torch.sigmoid(projected[t, :, n : 2 * n] + of_h[:, n : 2 * n])
        made = torch.tanh(projected[t, :, 2 * n :] + r * of_h[:, 2 * n :])
        h = made + z * (h - made)
    return h


def _gru_complement(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Any:
    """A reset gate by what it does not reset."""
    for t in range(x.shape[0]):
        keep, z = torch.sigmoid(m.xi(x[t]) + m.hi(h)), torch.sigmoid(m.xf(x[t]) + m.hf(h))
        h = (1 - z) * torch.tanh(m.xg(x[t]) + (1 - keep) * m.hg(h)) + z * h
    return h


# ---- plain cells


def _written_tanh(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Any:
    for t in range(x.shape[0]):
        total = m.xi(x[t]) + m.hi(h)
        h = (torch.exp(total) - torch.exp(-total)) / (torch.exp(total) + torch.exp(-total))
    return h


def _scaled_sum(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Any:
    for t in range(x.shape[0]):
        h = torch.tanh(2 * m.xi(x[t]) + m.hi(h) / 2 - m.peep[0])
    return h


# ---- cells that PyTorch has no call for


def _reset_before(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Any:
    """A GRU as in its first paper (Cho et al., 2014)."""
    outputs = []
    for t in range(x.shape[0]):
        z, r = torch.sigmoid(m.both2(torch.cat((x[t], h), 1))).chunk(2, 1)
        made = torch.tanh(m.both_g(torch.cat((x[t], r * h), 1)))
        h = (1 - z) * h + z * made
        outputs.append(m.out(h))
    return torch.stack(outputs), h


def _minimal(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Any:
    """Minimal gated unit (Zhou et al., 2016)."""
    for t in range(x.shape[0]):
        f = torch.sigmoid(m.xf(x[t]) + m.hf(h))
        h = (1 - f) * h + f * torch.tanh(m.xg(x[t]) + m.hg(f * h))
    return h


def _forget_gate_alone(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Any:
    """One gate, and no product in the new state (Heck and Salem, 2017)."""
    outputs = []
    for t in range(x.shape[0]):
        f = torch.sigmoid(m.xf(x[t]) + m.hf(h))
        h = f * h + (1 - f) * torch.tanh(m.xg(x[t]))
        outputs.append(h)
    return torch.stack(outputs, 1)


def _peepholes(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    """Gates that see the memory (Gers and Schmidhuber, 2000)."""
    outputs = []
    for t in range(x.shape[0]):
        i, f, g, o = (m.x4(x[t]) + m.bare4(h)).chunk(4, 1)
        i, f = torch.sigmoid(i + m.peep[0] * c), torch.sigmoid(f + m.peep[1] * c)
        c = f * c + i * torch.tanh(g)
        h = torch.sigmoid(o + m.peep[2] * c) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs), c


def _hard_lstm(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    for t in range(x.shape[0]):
        i, f, g, o = (m.x4(x[t]) + m.h4(h)).chunk(4, 1)
        c = F.hardsigmoid(f) * c + F.hardsigmoid(i) * F.hardtanh(g)
        h = F.hardsigmoid(o) * F.hardtanh(c)
    return h, c


def _memories(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    """An LSTM whose memories are read after each step."""
    memories = []
    for t in range(x.shape[0]):
        i, f, g, o = (m.x4(x[t]) + m.h4(h)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        memories.append(c)
    return torch.stack(memories), h


def _multiplied_memory(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    """A matrix for the memory, too."""
    for t in range(x.shape[0]):
        i, f, g, o = (m.x4(x[t]) + m.h4(h) + m.bare4(c)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
    return h, c


def _residual(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Any:
    """Leaky units: a step of Euler's method."""
    outputs = []
    for t in range(x.shape[0]):
        h = h + 0.1 * (torch.tanh(m.xi(x[t]) + m.hi(h)) - h)
        outputs.append(h)
    return torch.stack(outputs)


def _added_input(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Any:
    """An input that no layer made, scaled by unit."""
    x = F.pad(x, (0, max(0, m.hidden - x.shape[2])))[:, :, : m.hidden]
    for t in range(x.shape[0]):
        h = torch.tanh(x[t] * m.scale + m.hi(h))
    return h


def _highway(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Any:
    """A gate of the input alone, and gelu."""
    for t in range(x.shape[0]):
        gate = torch.sigmoid(m.xg(x[t]))
        h = gate * F.gelu(m.both_i(torch.cat((h, x[t]), 1))) + (1 - gate) * h
    return h


def _masked(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Any:
    """Rows that are shorter keep their states."""
    mask = (x[:, :, :1] > 0).to(x.dtype)
    for t in range(x.shape[0]):
        h = mask[t] * torch.tanh(m.xi(x[t]) + m.hi(h)) + (1 - mask[t]) * h
    return h


def _zoneout(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    """In evaluation (Krueger et al., 2017)."""
    outputs = []
    for t in range(x.shape[0]):
        i, f, g, o = (m.x4(x[t]) + m.h4(h)).chunk(4, 1)
        made = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = 0.9 * torch.sigmoid(o) * torch.tanh(made) + 0.1 * h
        c = 0.8 * made + 0.2 * c
        outputs.append(h)
    return torch.stack(outputs)


LSTM: dict[str, Steps] = {
    "beside, i f g o": _lstm(_beside, "ifgo"),
    "two layers, i f o g": _lstm(_two, "ifog"),
    "products, f i g o": _lstm(_products, "figo"),
    "the state first, o g f i": _lstm(_state_beside, "ogfi"),
    "no biases": _lstm(_no_biases, "ifgo"),
    "a forget bias": _lstm(_beside, "igfo", forget=1.0),
    "sigmoid written out": _lstm(_two, "ifgo", written_sigmoid),
    "sigmoid by tanh": _lstm(_two, "ifgo", lambda x: 0.5 * torch.tanh(0.5 * x) + 0.5),
    "split": _split_lstm,
    "slices": _sliced_lstm,
    "a view of gates": _viewed_lstm,
    "gates beside each other": _interleaved_lstm,
    "eight layers": _eight_layers,
    "four layers": _four_layers,
    "projected before": _projected_lstm,
    "projected by gate": _projected_by_gate,
    "cut before they are added": _cut_before,
    "coupled gates": _coupled_lstm,
    "both directions": _both_directions,
    "two layers of it": _two_lstm_layers,
}
GRU: dict[str, Steps] = {
    "(1 - z) n + z h": _gru(lambda z, n, h: (1 - z) * n + z * h),
    "z h + (1 - z) n, z r n": _gru(lambda z, n, h: z * h + (1 - z) * n, "zrn"),
    "n + z (h - n)": _gru(lambda z, n, h: n + z * (h - n)),
    "h - (1 - z) (h - n)": _gru(lambda z, n, h: h - (1 - z) * (h - n), "nzr"),
    "lerp": _gru(lambda z, n, h: torch.lerp(n, h, z)),
    "(1 - z) h + z n": _gru(lambda z, n, h: (1 - z) * h + z * n),
    "rsub": _gru(lambda z, n, h: torch.rsub(z, 1.0) * n + h * z),
    "layers": _gru_by_layers,
    "two gates in one": _gru_in_one,
    "projected before": _gru_projected,
    "a complement that resets": _gru_complement,
}
PLAIN: dict[str, Steps] = {"tanh written out": _written_tanh, "a sum that is scaled": _scaled_sum}
OTHERS: dict[str, Steps] = {
    "a reset before the product": _reset_before,
    "a minimal gated unit": _minimal,
    "a forget gate alone": _forget_gate_alone,
    "peepholes": _peepholes,
    "hard functions": _hard_lstm,
    "memories that are read": _memories,
    "a memory that is multiplied": _multiplied_memory,
    "a residual": _residual,
    "an input that no layer made": _added_input,
    "a highway": _highway,
    "masked steps": _masked,
    "zoneout": _zoneout,
}
"""Steps of products of states and of what each unit computes by itself."""
