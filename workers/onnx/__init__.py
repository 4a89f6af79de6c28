"""The engine on onnxruntime, which needs no torch."""

import os

# Before any import of onnxruntime: from 1.29 on the library sends figures about its use to its maker, from a thread of
# its own, which a fork would lose.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
