"""The orchestrator: takes a module in, conducts the five agents through a search, and keeps what was found.

Data flows intake → search_run (→ search, walks, pipeline, ledger, finalists) → archive → report, pages and export.
`hosting` runs searches, `servicer` offers them over gRPC, `local` starts all services here, `cli` is a client.
"""

import sys

if sys.platform != "linux":
    raise ImportError(
        f"Warpsmith runs on Linux, and this is {sys.platform}: on Windows use WSL 2, on macOS a Linux virtual machine, "
        "container or server (docs/index.md)"
    )
