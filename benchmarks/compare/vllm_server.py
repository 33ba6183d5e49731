"""vLLM's server as the async trainer of TRL needs it on CPU: `python -m benchmarks.compare.vllm_server OPTIONS`.

In development mode, because TRL needs /pause, /resume and /collective_rpc. Without seeds: TRL sends one with each
request, and on CPU a seed ends vLLM's engine ("CPU Generator does not use offset").
"""

from __future__ import annotations

import os

from benchmarks.compare.trl_on_cpu import FileLoading, use_plain_linear_layers

__all__ = ["FileLoading"]

use_plain_linear_layers()  # the engine's process imports this module as that of the worker's extension

if __name__ == "__main__":
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    from vllm.entrypoints.launchers.api_server.entry import main
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    with_seed = CompletionRequest.to_sampling_params

    def without_seed(self, *arguments, **options):  # type: ignore[no-untyped-def]
        self.seed = None
        return with_seed(self, *arguments, **options)

    CompletionRequest.to_sampling_params = without_seed
    main()
