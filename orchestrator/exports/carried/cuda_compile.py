"""Compiles CUDA sources by NVRTC, which needs neither a GPU nor torch."""

from cuda.bindings import nvrtc as _ws_nvrtc


def _ws_compiled(sources, architecture):
    """The cubin of `sources`, texts by file name, of which the first is compiled for a GPU architecture."""
    names = list(sources)
    texts = [sources[name].encode() for name in names]
    headers, included = texts[1:], [name.encode() for name in names[1:]]
    made = _ws_nvrtc.nvrtcCreateProgram(texts[0], names[0].encode(), len(headers), headers, included)
    program = _ws_check(made)
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++20"]
    error = _ws_nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    if int(error):
        log = b" " * _ws_check(_ws_nvrtc.nvrtcGetProgramLogSize(program))
        _ws_check(_ws_nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"NVRTC refused the kernel:\n{log.decode()}")
    cubin = b" " * _ws_check(_ws_nvrtc.nvrtcGetCUBINSize(program))
    _ws_check(_ws_nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


def _ws_check(result):
    """The value of a driver or NVRTC call, or an exception that names the error."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA: {error.name}")
    return values[0] if values else None
