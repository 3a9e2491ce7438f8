"""`toy_serve.py WORKER SETTINGS`: a real server process around a function of `toy_worker`; settings are JSON."""

import json
import sys

from engine.config import EngineConfig, SpecConfig
from engine.logs import configure_logging
from engine.server.launch import serve

if __name__ == "__main__":
    settings = json.loads(sys.argv[2])
    configure_logging("info")
    sys.exit(
        serve(EngineConfig(**{**settings, "spec": SpecConfig(**settings.get("spec", {}))}), f"toy_worker:{sys.argv[1]}")
    )
