"""A container runtime without containers: commands, answers and errors as `docker` has them, state in a folder.

    FAKE_DOCKER=/some/folder python fake_docker.py daemon        # until it is killed; the containers go with it
    FAKE_DOCKER=/some/folder python fake_docker.py run … IMAGE COMMAND…

The daemon starts the server of a container as its own child, in an environment that holds only what the image and
`--env` give: for whoever called `run`, it is outside of the family and carries no marker. `images.json` in the folder
holds the images (name → {"Id", "RepoDigests", "Env"}), `rules.json` how the daemon misbehaves.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

NO_DAEMON = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"


def folder() -> Path:
    return Path(os.environ["FAKE_DOCKER"])


# -- the daemon -------------------------------------------------------------------------------------------------------


class Daemon:
    def __init__(self) -> None:
        self.containers: dict[str, dict] = {}
        self.processes: dict[str, subprocess.Popen] = {}

    def serve(self) -> None:
        path = folder() / "docker.sock"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen(16)
            print("up", flush=True)
            while True:
                connection, _ = server.accept()
                threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rw") as stream:
            request = json.loads(stream.readline())
            try:
                reply = {"result": getattr(self, request.pop("do"))(**request)}
            except LookupError as error:
                reply = {"error": str(error.args[0])}
            stream.write(json.dumps(reply) + "\n")

    def rules(self) -> dict:
        file = folder() / "rules.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def images(self) -> dict:
        return json.loads((folder() / "images.json").read_text())

    def image(self, name: str) -> dict:
        for known, entry in self.images().items():
            if name in (known, entry["Id"], *entry["RepoDigests"]):
                return {"Id": entry["Id"], "RepoDigests": entry["RepoDigests"], "Config": {"Env": entry["Env"]}}
        raise LookupError(f"No such image: {name}")

    def create(self, image: str, command: list[str], labels: dict, env: dict, network: str, publish: list) -> str:
        variables = dict(entry.split("=", 1) for entry in self.image(image)["Config"]["Env"])
        name = secrets.token_hex(32)
        ports = {f"{inside}/tcp": [{"HostIp": ip, "HostPort": port}] for ip, port, inside in publish}
        self.containers[name] = {
            "Id": name,
            "State": {"Status": "created", "Running": False, "Pid": 0, "ExitCode": 0, "OOMKilled": False, "Error": ""},
            "Config": {"Labels": labels, "Image": image},
            "HostConfig": {"NetworkMode": network},
            "NetworkSettings": {"Ports": ports},
            "_command": command,
            "_env": {**variables, **env},
        }
        return name

    def start(self, name: str) -> None:
        container = self.find(name)
        state = container["State"]
        if broken := self.rules().get("start_error"):
            state |= {"Error": broken, "ExitCode": 128}
            raise LookupError(broken)
        with open(folder() / f"{name}.log", "wb") as log:
            try:
                process = subprocess.Popen(
                    container["_command"],
                    env={**container["_env"], "HOSTNAME": name},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                state |= {"Error": f"exec: {error.strerror}", "ExitCode": 127}
                raise LookupError(f'failed to create task: exec: "{container["_command"][0]}": {error}') from error
        self.processes[name] = process
        shown = 0 if self.rules().get("hides_pids") else process.pid
        state |= {"Status": "running", "Running": True, "Pid": shown, "StartedAt": now()}
        threading.Thread(target=self.watch, args=(name,), daemon=True).start()

    def watch(self, name: str) -> None:
        process = self.processes[name]
        code = process.wait()
        end_all(process.pid, name)  # a container ends with its first process
        state = self.containers[name]["State"]
        killed = code == -signal.SIGKILL and bool(self.rules().get("oom_killed"))
        state |= {
            "Status": "exited",
            "Running": False,
            "Pid": 0,
            "ExitCode": code if code >= 0 else 128 - code,
            "OOMKilled": killed,
            "FinishedAt": now(),
        }

    def find(self, name: str) -> dict:
        found = [one for one in self.containers if one.startswith(name)]
        if len(found) != 1:
            raise LookupError(f"No such container: {name}")
        return self.containers[found[0]]

    def inspect(self, name: str) -> dict:
        return {key: value for key, value in self.find(name).items() if not key.startswith("_")}

    def stop(self, name: str, grace: float) -> str:
        container = self.find(name)
        process = self.processes.get(container["Id"])
        if process is not None and process.poll() is None:
            process.terminate()
            if not self.ended(container, grace):
                end_all(process.pid, container["Id"])
                self.ended(container, 10)
        return container["Id"]

    def remove(self, name: str) -> str:
        container = self.find(name)
        if self.rules().get("keeps_containers"):
            raise LookupError("could not kill: tried to kill container, but did not receive an exit event")
        process = self.processes.get(container["Id"])
        if process is not None and process.poll() is None:
            end_all(process.pid, container["Id"])
            self.ended(container, 10)
        self.containers.pop(container["Id"])
        return container["Id"]

    def ended(self, container: dict, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while container["State"]["Running"] and time.monotonic() < deadline:
            time.sleep(0.01)
        return not container["State"]["Running"]

    def list(self, label: str) -> list[str]:
        key, equals, value = label.partition("=")
        labels = {name: one["Config"]["Labels"] for name, one in self.containers.items()}
        return [name for name, has in labels.items() if key in has and (not equals or has[key] == value)]


def end_all(pid: int, name: str) -> None:
    """Kills all that a container has run, in whatever session: a real one takes its pid namespace with it."""
    mine = f"HOSTNAME={name}".encode()
    for entry in os.listdir("/proc"):
        try:
            if not entry.isdigit():
                continue
            if os.getsid(int(entry)) == pid or mine in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                os.kill(int(entry), signal.SIGKILL)
        except OSError:
            continue


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f") + "000Z"


# -- the client -------------------------------------------------------------------------------------------------------


def ask(do: str, **request: object) -> object:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(folder() / "docker.sock"))
        except OSError:
            sys.exit(NO_DAEMON)
        with connection.makefile("rw") as stream:
            stream.write(json.dumps({"do": do, **request}) + "\n")
            stream.flush()
            reply = json.loads(stream.readline())
    if "error" in reply:
        raise LookupError(reply["error"])
    return reply["result"]


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="docker run", allow_abbrev=False)
    for flag in ("--cidfile", "--network", "--shm-size", "--gpus", "--log-driver", "--pull"):
        parser.add_argument(flag)
    for flag in ("--label", "--env", "-e", "--mount", "--device", "--publish", "--ulimit"):
        parser.add_argument(flag, action="append", default=[])
    parser.add_argument("--init", action="store_true")
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    env = {}
    for entry in [*options.env, *options.e]:
        name, equals, value = entry.partition("=")
        if equals or name in os.environ:
            env[name] = value if equals else os.environ[name]
    if options.cidfile and Path(options.cidfile).exists():
        print("docker: container ID file found, make sure the other container isn't running", file=sys.stderr)
        return 125
    try:
        name = str(
            ask(
                "create",
                image=options.image,
                command=options.command,
                labels=dict(label.split("=", 1) for label in options.label),
                env=env,
                network=options.network or "bridge",
                publish=[entry.split(":") for entry in options.publish],
            )
        )
        if options.cidfile:
            Path(options.cidfile).write_text(name)
        # A client passes on the signals that it gets.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _frame: ask("stop", name=name, grace=0) and None)
        ask("start", name=name)
    except LookupError as error:
        print(f"docker: Error response from daemon: {error}", file=sys.stderr)
        return 127 if "exec:" in str(error) else 125
    return attach(name)


def attach(name: str) -> int:
    """The container's output until its end; its exit code."""
    with open(folder() / f"{name}.log", "rb") as log:
        while True:
            try:
                state = ask("inspect", name=name)["State"]  # type: ignore[index]
            except LookupError:
                state = {"Running": False, "ExitCode": 137}
            while data := log.read(1 << 16):
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            if not state["Running"]:
                return int(state["ExitCode"])
            time.sleep(0.02)


def main(argv: list[str]) -> int:
    command, rest = argv[0], argv[1:]
    if command == "daemon":
        Daemon().serve()
    if command == "run":
        return run(rest)
    if command == "version":
        ask("list", label="x")
        print("28.0.0-fake")
        return 0
    try:
        if command == "ps":
            label = rest[rest.index("--filter") + 1].removeprefix("label=")
            print("\n".join(ask("list", label=label)))  # type: ignore[arg-type]
        elif argv[:2] == ["image", "inspect"]:
            print(json.dumps([ask("image", name=rest[1])], indent=4))
        elif argv[:2] == ["container", "inspect"]:
            return inspect(rest[1:])
        elif command == "stop":
            print(ask("stop", name=rest[-1], grace=float(rest[rest.index("-t") + 1])))
        elif command == "rm":
            print(ask("remove", name=rest[-1]))
        else:
            print(f"docker: '{command}' is not a docker command.", file=sys.stderr)
            return 1
    except LookupError as error:
        if argv[:2] == ["image", "inspect"]:
            print("[]")
        print(f"Error response from daemon: {error}", file=sys.stderr)
        return 1
    return 0


def inspect(names: list[str]) -> int:
    found, status = [], 0
    for name in names:
        try:
            found.append(ask("inspect", name=name))
        except LookupError as error:
            print(f"Error response from daemon: {error}", file=sys.stderr)
            status = 1
    print(json.dumps(found, indent=4))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
