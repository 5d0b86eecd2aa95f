"""The live page: runs in a browser while they go, beside any orchestrator.

Data flows OptimizationService → `run_channel`, `overview` (one stream for all watchers) → `hub` (what each of them has
not been told) → `application` (routes) → `guard` (token, host, origin) → `serving` (uvicorn). `run_parts`,
`comparison` and `submission` make what is shown; HTML is in `orchestrator/pages/templates`. Starlette and uvicorn are
the extra `web`.
"""
