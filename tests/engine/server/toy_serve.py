"""`toy_serve.py WORKER SETTINGS`: a real server process around a function of `toy_worker`; settings are JSON.

The setting `limits` shortens the limits of `Connection` and of bodies, and the number of `files`.
"""

import json
import resource
import sys

from engine.config import EngineConfig, SpecConfig
from engine.logs import configure_logging
from engine.server import body
from engine.server.connection import Connection
from engine.server.launch import serve

if __name__ == "__main__":
    settings = json.loads(sys.argv[2])
    for name, value in settings.pop("limits", {}).items():
        if name == "files":
            resource.setrlimit(resource.RLIMIT_NOFILE, (value, value))
        else:
            setattr(body if name.isupper() else Connection, name, value)
    configure_logging("info", settings.get("log_format", "text"))
    sys.exit(
        serve(EngineConfig(**{**settings, "spec": SpecConfig(**settings.get("spec", {}))}), f"toy_worker:{sys.argv[1]}")
    )
