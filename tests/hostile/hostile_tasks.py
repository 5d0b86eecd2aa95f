"""The modules that hostile and honest programs pretend to be, and how a kernel's text becomes a program for one.

The one idea: a kernel is a C++ body over named pointers (`x`, `y`, `w`), so that a case is its body and little else.
Nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.utils import _pytree as pytree

from warpsmith import digest
from warpsmith.v1 import candidate_pb2, graph_pb2, task_pb2, tensor_pb2

F32, I64, I32, I8 = (
    tensor_pb2.DTYPE_FLOAT32, tensor_pb2.DTYPE_INT64, tensor_pb2.DTYPE_INT32, tensor_pb2.DTYPE_INT8
)  # fmt: skip
_SPELLING = {F32: "float", I64: "std::int64_t", I32: "std::int32_t", I8: "std::int8_t"}


@dataclass(frozen=True)
class Tensor:
    """A contiguous tensor of a kernel."""

    shape: tuple[int, ...]
    dtype: tensor_pb2.Dtype.ValueType = F32
    parameter: str = ""
    """Qualified name where it is a parameter of the module, or its state."""
    is_state: bool = False
    """Whether it is state, which kernels may write."""
    stays_zero: bool = False
    """Of a workspace: zero before the first call and left zero by every call."""

    def spec(self) -> tensor_pb2.TensorSpec:
        """As the contract has it."""
        strides, step = [], 1
        for extent in reversed(self.shape):
            strides.insert(0, step)
            step *= max(1, extent)
        return tensor_pb2.TensorSpec(dtype=self.dtype, shape=self.shape, strides=strides)


@dataclass(frozen=True)
class Module:
    """A module in KernelBench's format, with the tensors of its kernels."""

    name: str
    forward: str
    """Expression over `x` and `self`."""
    inputs: str
    """What get_inputs returns."""
    sources: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    constants: str
    """C++ that kernels see: the extents."""
    honest: str
    """Body of a plain kernel that is right."""
    init: str = "pass"
    """Statement of the constructor."""
    before: str = ""
    """Statement of the forward ahead of its return."""
    step: task_pb2.TrainingStep | None = None
    """Set for a training step, whose given gradients come behind the inputs."""
    output_tree: str = ""
    """Structure of the outputs as pytree writes it, where they are more than a tensor or a tuple."""

    def text(self) -> str:
        """The file."""
        return (
            "import torch\n\n\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            f"        {self.init}\n\n    def forward(self, x):\n        {self.before or 'pass'}\n"
            f"        return {self.forward}\n\n\ndef get_inputs():\n    return {self.inputs}\n\n\n"
            "def get_init_inputs():\n    return []\n"
        )

    def task(self) -> task_pb2.Task:
        """The file as a task of the cpu target."""
        made = task_pb2.Task(
            name=self.name,
            sources=[task_pb2.SourceFile(path="model.py", content=self.text().encode())],
            entry_path="model.py",
            class_name="Model",
            target=task_pb2.TARGET_CPU,
            precision=task_pb2.PRECISION_FP32,
            training_step=self.step,
        )
        made.digest = digest.of_task(made)
        return made


WORKSPACE = {"w": Tensor((64,))}

HEADERS = "#include <cmath>\n#include <cstdint>\n#include <cstdlib>\n#include <cstring>\n"


def program(
    module: Module,
    bodies: Sequence[str],
    *,
    ahead: str = "",
    headers: str = HEADERS,
    workspaces: Mapping[str, Tensor] = WORKSPACE,
) -> candidate_pb2.Program:
    """A program with one launch for each body; every launch gets all buffers and may write all but the sources."""
    tensors = {**module.sources, **module.outputs, **workspaces}
    text = f"{headers}{module.constants}\n{ahead}\n"
    for number, body in enumerate(bodies):
        names = "".join(
            f"    auto* {name} = static_cast<{_SPELLING[tensor.dtype]}*>(arguments[{position}]);\n    (void){name};\n"
            for position, (name, tensor) in enumerate(tensors.items())
        )
        text += f'extern "C" void run{number}(void* const* arguments) {{\n{names}{body}\n}}\n'
    arguments = [candidate_pb2.LaunchArgument(buffer=name) for name in tensors]
    states = [name for name, tensor in module.sources.items() if tensor.is_state]
    writes = [*module.outputs, *states, *workspaces]
    made = candidate_pb2.Program(
        target=task_pb2.TARGET_CPU,
        sources=[candidate_pb2.DeviceSource(name="kernel.cpp", text=text)],
        buffers=[_buffer(name, tensor, module) for name, tensor in tensors.items()],
        steps=[
            candidate_pb2.Step(
                group="y", launch=candidate_pb2.Launch(entry=f"run{number}", arguments=arguments, writes=writes)
            )
            for number in range(len(bodies))
        ],
        outputs=list(module.outputs),
        output_tree=module.output_tree,
    )
    made.digest = digest.of_program(made)
    return made


def _buffer(name: str, tensor: Tensor, module: Module) -> candidate_pb2.Buffer:
    if name in module.outputs:
        return candidate_pb2.Buffer(name=name, role=candidate_pb2.ROLE_OUTPUT, spec=tensor.spec())
    if name not in module.sources:
        return candidate_pb2.Buffer(
            name=name, role=candidate_pb2.ROLE_WORKSPACE, spec=tensor.spec(), zero_between_calls=tensor.stays_zero
        )
    inputs = [each for each, of in module.sources.items() if not of.parameter]
    place = inputs.index(name) if name in inputs else 0
    source = graph_pb2.Source(name=name, spec=tensor.spec(), origin=graph_pb2.ORIGIN_INPUT, input_index=place)
    if tensor.parameter:
        origin = graph_pb2.ORIGIN_STATE if tensor.is_state else graph_pb2.ORIGIN_PARAMETER
        source.origin, source.qualified_name = origin, tensor.parameter
    return candidate_pb2.Buffer(name=name, role=candidate_pb2.ROLE_SOURCE, spec=tensor.spec(), source=source)


def plan_zero(graph: graph_pb2.Graph) -> candidate_pb2.Program:
    """Every call of a captured graph as a library step: what eager does, as a program."""
    made = candidate_pb2.Program(target=task_pb2.TARGET_CPU, outputs=graph.outputs, output_tree=graph.output_tree)
    for source in graph.sources:
        made.buffers.add(name=source.name, role=candidate_pb2.ROLE_SOURCE, spec=source.spec, source=source)
    for node in graph.nodes:
        for result in node.results:
            if result.name:
                made.buffers.add(name=result.name, role=candidate_pb2.ROLE_LIBRARY, spec=result.spec)
        call = candidate_pb2.LibraryCall(
            target=node.target, args=node.args, kwargs=node.kwargs, results=[result.name for result in node.results]
        )
        made.steps.add(group=node.name, library=call)
    made.digest = digest.of_program(made)
    return made


# ---- modules -----------------------------------------------------------------------------------------------

_ROW = "const float* row = x + i * COLUMNS;"

SOFTMAX = Module(
    name="softmax",
    forward="torch.softmax(x, dim=-1)",
    inputs="[torch.rand(16, 33)]",
    sources={"x": Tensor((16, 33))},
    outputs={"y": Tensor((16, 33))},
    constants="constexpr long ROWS = 16, COLUMNS = 33, SIZE = ROWS * COLUMNS;",
    honest=f"""
    for (long i = 0; i < ROWS; ++i) {{
        {_ROW}
        float m = -INFINITY;
        double s = 0;
        for (long j = 0; j < COLUMNS; ++j) m = std::isnan(row[j]) ? row[j] : (row[j] > m ? row[j] : m);
        for (long j = 0; j < COLUMNS; ++j) s += std::exp(row[j] - m);
        for (long j = 0; j < COLUMNS; ++j) y[i * COLUMNS + j] = std::exp(row[j] - m) / s;
    }}
""",
)

STEP = Module(
    name="silu_step",
    forward="torch.nn.functional.silu(x)",
    inputs="[torch.randn(16, 33)]",
    sources={"x": Tensor((16, 33)), "g": Tensor((16, 33))},
    outputs={"y": Tensor((16, 33)), "d": Tensor((16, 33))},
    constants="constexpr long ROWS = 16, COLUMNS = 33, SIZE = ROWS * COLUMNS;",
    honest="""
    for (long i = 0; i < SIZE; ++i) {
        const double s = 1.0 / (1.0 + std::exp(-static_cast<double>(x[i])));
        y[i] = static_cast<float>(x[i] / (1.0 + std::exp(-static_cast<double>(x[i]))));
        d[i] = static_cast<float>(g[i] * (s * (1.0 + x[i] * (1.0 - s))));
    }
""",
    step=task_pb2.TrainingStep(inputs=[0], outputs=[0], gradients=[Tensor((16, 33)).spec()]),
    output_tree=pytree.treespec_dumps(pytree.tree_structure((0, [0], {}))),
)

MILLION = Module(
    name="million",
    forward="torch.relu(x), x.sum()",
    inputs="[torch.rand(1024, 1024)]",
    sources={"x": Tensor((1024, 1024))},
    outputs={"y": Tensor((1024, 1024)), "s": Tensor(())},
    constants="constexpr long SIZE = 1024 * 1024;",
    honest="""
    double total = 0;
    #pragma omp parallel for reduction(+ : total) schedule(static)
    for (long i = 0; i < SIZE; ++i) {
        y[i] = x[i] < 0 ? 0.0f : x[i];
        total += x[i];
    }
    s[0] = static_cast<float>(total);
""",
)

LINEAR = Module(
    name="linear",
    forward="self.linear(x)",
    inputs="[torch.rand(64, 512)]",
    sources={"x": Tensor((64, 512)), "weight": Tensor((64, 512), parameter="linear.weight")},
    outputs={"y": Tensor((64, 64))},
    constants="constexpr long M = 64, N = 64, K = 512, SIZE = M * N;",
    honest="""
    for (long m = 0; m < M; ++m)
        for (long n = 0; n < N; ++n) {
            float sums[8] = {};
            for (long k = 0; k < K; k += 8)
                for (long l = 0; l < 8; ++l) sums[l] += x[m * K + k + l] * weight[n * K + k + l];
            y[m * N + n] = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
        }
""",
    init="self.linear = torch.nn.Linear(512, 64, bias=False)",
)

LARGEST = Module(
    name="largest",
    forward="x.abs().amax(dim=1), x.argmax(dim=1)",
    inputs="[torch.rand(16, 33).sort(dim=1).values]",
    sources={"x": Tensor((16, 33))},
    outputs={"y": Tensor((16,)), "at": Tensor((16,), I64)},
    constants="constexpr long ROWS = 16, COLUMNS = 33, SIZE = ROWS * COLUMNS;",
    honest=f"""
    for (long i = 0; i < ROWS; ++i) {{
        {_ROW}
        float m = 0;
        long best = 0;
        for (long j = 0; j < COLUMNS; ++j) {{
            const float size = std::fabs(row[j]);
            m = std::isnan(m) || size <= m ? m : size;
            if (!std::isnan(row[best]) && (std::isnan(row[j]) || row[j] > row[best])) best = j;
        }}
        y[i] = m;
        at[i] = best;
    }}
""",
)

EMPTY = Module(
    name="empty",
    forward="x.sum(dim=1)",
    inputs="[torch.rand(4, 0)]",
    sources={"x": Tensor((4, 0))},
    outputs={"y": Tensor((4,))},
    constants="constexpr long ROWS = 4, COLUMNS = 0;",
    honest="for (long i = 0; i < ROWS; ++i) y[i] = 0;",
)

BATCH_NORM = Module(
    name="batch_norm",
    forward="self.norm(x)",
    inputs="[torch.rand(64, 8)]",
    sources={
        "x": Tensor((64, 8)),
        "weight": Tensor((8,), parameter="norm.weight"),
        "bias": Tensor((8,), parameter="norm.bias"),
    },
    outputs={"y": Tensor((64, 8))},
    constants="constexpr long ROWS = 64, COLUMNS = 8;",
    honest="",  # updates state: only plan zero is honest here
    init="self.norm = torch.nn.BatchNorm1d(8)",
)

TRAINED = replace(
    BATCH_NORM,
    name="trained_batch_norm",
    sources={
        **BATCH_NORM.sources,
        "means": Tensor((8,), parameter="norm.running_mean", is_state=True),
        "variances": Tensor((8,), parameter="norm.running_var", is_state=True),
        "count": Tensor((), I64, parameter="norm.num_batches_tracked", is_state=True),
    },
    honest="""
    // ahead
    for (long j = 0; j < COLUMNS; ++j) {
        double mean = 0, variance = 0;
        for (long i = 0; i < ROWS; ++i) mean += x[i * COLUMNS + j] / ROWS;
        for (long i = 0; i < ROWS; ++i) variance += (x[i * COLUMNS + j] - mean) * (x[i * COLUMNS + j] - mean) / ROWS;
        means[j] = static_cast<float>(0.9 * means[j] + 0.1 * mean);
        variances[j] = static_cast<float>(0.9 * variances[j] + 0.1 * variance * ROWS / (ROWS - 1));
        const double scale = weight[j] / std::sqrt(variance + 1e-5);
        for (long i = 0; i < ROWS; ++i)
            y[i * COLUMNS + j] = static_cast<float>((x[i * COLUMNS + j] - mean) * scale + bias[j]);
    }
    count[0] += 1;
""",
)
"""The same with the statistics that it updates."""

IN_PLACE = Module(
    name="in_place",
    forward="x * 2",
    before="x.add_(1)",
    inputs="[torch.rand(16, 33)]",
    sources={"x": Tensor((16, 33))},
    outputs={"y": Tensor((16, 33))},
    constants="",
    honest="",
)

MASKED = Module(
    name="masked",
    forward="torch.softmax(x.masked_fill(self.mask, float('-inf')), dim=-1)",
    inputs="[torch.rand(16, 33)]",
    sources={"x": Tensor((16, 33))},
    outputs={"y": Tensor((16, 33))},
    constants=SOFTMAX.constants,
    honest=f"""
    for (long i = 0; i < ROWS; ++i) {{
        {_ROW}
        float m = -INFINITY;
        double s = 0;
        for (long j = 0; j <= i; ++j) m = std::isnan(row[j]) ? row[j] : (row[j] > m ? row[j] : m);
        for (long j = 0; j <= i; ++j) s += std::exp(row[j] - m);
        const float masked = s > 0 && m > -INFINITY ? 0.0f : std::exp(-INFINITY - m) / s;
        for (long j = 0; j < COLUMNS; ++j) y[i * COLUMNS + j] = j <= i ? std::exp(row[j] - m) / s : masked;
    }}
""",
    init="self.register_buffer('mask', torch.ones(16, 33).triu(1).bool())",
)

LOGARITHM = Module(
    name="logarithm",
    forward="torch.log(x - 0.5)",
    inputs="[torch.rand(16, 33)]",
    sources={"x": Tensor((16, 33))},
    outputs={"y": Tensor((16, 33))},
    constants=SOFTMAX.constants,
    honest="for (long i = 0; i < SIZE; ++i) y[i] = std::log(x[i] - 0.5f);",
)

TINY = Module(
    name="tiny",
    forward="torch.relu(x)",
    inputs="[torch.randn(8)]",
    sources={"x": Tensor((8,))},
    outputs={"y": Tensor((8,))},
    constants="constexpr long SIZE = 8;",
    honest="for (long i = 0; i < SIZE; ++i) y[i] = x[i] < 0 ? 0.0f : x[i];",
)
