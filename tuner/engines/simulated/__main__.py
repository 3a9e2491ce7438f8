"""`python -m tuner.engines.simulated --port 8000`: serves a simulated machine. Nothing it says was measured."""

from __future__ import annotations

import argparse
import json
import random
import sys

from tuner.engines.simulated.machine import fault_at_start
from tuner.engines.simulated.noise import Noise
from tuner.engines.simulated.profiles import DEFAULT, profile_named


def main() -> int:
    """Starts the server, or fails as the machine would with these settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="simulated")
    parser.add_argument("--settings", default="{}", help="JSON: neutral names and values")
    parser.add_argument("--options", default="{}", help="JSON: profile, noise, speed, slots, launch_s")
    chosen = parser.parse_args()
    settings, options = json.loads(chosen.settings), json.loads(chosen.options)
    profile = profile_named(options.get("profile", DEFAULT))
    if fault := fault_at_start(profile, settings):
        name = "torch.OutOfMemoryError" if fault.kind == "oom_startup" else "RuntimeError"
        print(f"{name}: {fault.message}", file=sys.stderr)
        return 1

    import uvicorn

    from tuner.engines.simulated.server import Api, Simulation

    effect = random.gauss(0.0, Noise().times(float(options.get("noise", 1.0))).launch_sd)
    simulation = Simulation(
        profile,
        settings,
        speed=float(options.get("speed", 1.0)),
        launch_factor=1 + effect,
        slots=int(options.get("slots", 256)),
    )
    print(f"simulated machine {profile.name} on port {chosen.port}: nothing here is measured", flush=True)
    uvicorn.run(Api(simulation, chosen.model).app(), host=chosen.host, port=chosen.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
