"""Manifests for Kubernetes: ConfigMaps, a Deployment whose probes make real tokens, and a Service."""

from __future__ import annotations

import json
import re
from typing import Any

from tuner.errors import UsageError
from tuner.export.head import GRACE_S, PLAIN, START_S, Options, comment, lines, tensor_parallel
from tuner.export.provenance import Provenance
from tuner.export.words import Hole, Word
from tuner.export.workload import Workload, key_variable, probe, workload
from tuner.export.yaml_text import dump
from tuner.records import LaunchRecord

FILE = "kubernetes.yaml"

_GENERATES = {"bundled": "/health_generate", "sglang": "/health_generate"}
"""Engines with a path that answers once a real token was made."""

_POLL_S = 10

MOST = 1 << 20
"""Bytes that a ConfigMap may hold."""


def render_kubernetes(record: LaunchRecord, provenance: Provenance, options: Options = PLAIN) -> dict[str, str]:
    """File name → text.

    Raises:
        UsageError: for a record that a pod cannot express.
    """
    made, values = pod_values(record, provenance, options)
    text = "---\n".join(dump(manifest) for manifest in manifests(made.name, values))
    return {FILE: comment(head_of(made, record, provenance)) + text}


def head_of(made: Workload, record: LaunchRecord, provenance: Provenance, name: str | None = None) -> list[str]:
    """The comment of manifests and charts."""
    name = name or made.name
    head = [*lines(record, provenance), "", *made.notes]
    if made.secrets:
        given = " ".join(f"--from-literal={variable}=…" for variable in made.secrets)
        head.append(f"Secrets were left out: kubectl create secret generic {name}-secrets {given}")
    return head


def pod_values(record: LaunchRecord, provenance: Provenance, options: Options) -> tuple[Workload, dict[str, Any]]:
    """What the manifests and the chart's values have in common; in arguments, `$` is doubled where a pod wants it.

    Raises:
        UsageError: for a record that a pod cannot express.
    """
    made = workload(record, provenance.study, options, own_network=True)
    for what, texts in (("environment", made.env), ("files", made.files)):
        size = sum(len(name.encode()) + sum(len(str(part).encode()) for part in text) for name, text in texts.items())
        if size > MOST:
            raise UsageError(
                f"the launch record's {what} of {size >> 10} KiB do not fit in a ConfigMap ({MOST >> 10} KiB). Nothing "
                "was written."
            )
    targets = [*made.files, *(path for mount in made.mounts for path in (mount.source, mount.target))]
    if wrong := [path for path in targets if ":" in path or ".." in path.split("/")]:
        raise UsageError(f"a pod cannot mount {wrong[0]!r}: no path there may hold ':' or '..'. Nothing was written.")
    if bad := [name for name in made.env if name == "." or name.startswith("..")]:
        raise UsageError(f"the launch record sets {bad[0]!r}, which no ConfigMap can hold. Nothing was written.")
    if made.user and not made.user.isdecimal():
        raise UsageError(
            f"a pod runs as a number, and container.run_args name the user '{made.user}'. Nothing was written."
        )
    gpus = _gpus(made, record)
    if made.ulimits:
        said = ", ".join(f"{name}={limit}" for name, limit in made.ulimits.items())
        made.notes.append(f"A pod has no ulimits: the node's runtime must allow {said}.")
    if made.devices:
        made.notes.append(f"A device plugin must bring {', '.join(made.devices)}: a pod cannot name devices.")
    generates = _GENERATES.get(record.engine)
    key = key_variable(made)
    ready: dict[str, Any] = {"exec": {"command": probe(record, made.port, key)}}
    if generates:
        ready = {"httpGet": {"path": generates, "port": "http"}}
    figures = [
        {"concurrency": f.concurrency, "tokens_per_s": round(f.tokens_per_s, 1), "blocks": f.blocks}
        for f in provenance.figures
    ]
    return made, {
        "image": made.image,
        "command": [_said(word) for word in made.program],
        "args": [_said(word) for word in made.arguments],
        "env": {name: "".join(map(str, word)) for name, word in made.env.items() if not _is_secret(word)},
        "secretEnv": sorted({name for name, word in made.env.items() if _is_secret(word)} | set(made.secrets)),
        "files": dict(sorted(made.files.items())),
        "mounts": [{"source": m.source, "target": m.target, "readOnly": m.readonly} for m in made.mounts],
        "workingDir": made.workdir,
        "port": made.port,
        "replicas": 1,
        "gpus": gpus,
        "shmSize": _size(made.shm_size),
        "hostIPC": made.ipc_host,
        "privileged": made.privileged,
        "capAdd": [name.removeprefix("CAP_") for name in made.cap_add],
        "runAsUser": made.user,
        "readyProbe": ready,
        "livePath": record.ready_path,
        "startSeconds": START_S,
        "gracePeriodSeconds": GRACE_S,
        "nodeSelector": {},
        "tolerations": [],
        "annotations": {
            "spec-tuner/study": provenance.study,
            "spec-tuner/launch": str(provenance.launch),
            "spec-tuner/candidate": provenance.candidate,
            "spec-tuner/record": provenance.record_hash,
            "spec-tuner/engine": f"{record.engine} {provenance.engine_version}",
            "spec-tuner/decision": provenance.decision,
            "spec-tuner/figures": json.dumps(figures),
        },
    }


def _gpus(made: Workload, record: LaunchRecord) -> int:
    if made.gpus is None:
        return 0
    if isinstance(made.gpus, list):
        return len(made.gpus)
    if str(made.gpus).isdecimal():
        return int(made.gpus)
    count = tensor_parallel(record)
    made.notes.append(f"It was measured with all GPUs of the machine; the pod asks for {count}.")
    return count


def _is_secret(word: Word) -> bool:
    return any(isinstance(part, Hole) for part in word)


def _said(word: Word) -> str:
    """An argument. `$` is doubled only where a pod would read more in it: some readers never take the second off."""
    found = ""
    for i, part in enumerate(word):
        more = i + 1 < len(word)
        if isinstance(part, Hole):
            found += f"$({part.name})"
        else:
            found += re.sub(r"\${2,}|\$(?=\()" + (r"|\$\Z" * more), lambda m: 2 * m[0], part)
    return found


def _size(shm: str | None) -> str:
    """Docker's spelling of a size as Kubernetes'."""
    if shm is None:
        return ""
    found = re.fullmatch(r"(\d+)([bkmg]?)b?", shm.lower())
    assert found is not None, shm
    return found[1] + {"": "", "b": "", "k": "Ki", "m": "Mi", "g": "Gi"}[found[2]]


def manifests(name: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects. `chart/templates` makes the same of the same values; a test holds the two together."""
    labels = {"app.kubernetes.io/name": "spec-tuner-engine", "app.kubernetes.io/instance": name}
    files = {f"file-{i}": text for i, text in enumerate(values["files"].values())}

    def meta(suffix: str = "") -> dict[str, Any]:
        return {"name": f"{name}{suffix}", "labels": labels}

    found: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta("-env")}
        | ({"data": values["env"]} if values["env"] else {}),
    ]
    if files:
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta("-files"), "data": files})
    found.append(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {**meta(), "annotations": values["annotations"]},
            "spec": {
                "replicas": values["replicas"],
                # A second server would need GPUs of its own meanwhile.
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels, "annotations": values["annotations"]},
                    "spec": _pod(name, values),
                },
            },
        }
    )
    port = {"name": "http", "port": values["port"], "targetPort": "http"}
    found.append(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta(),
            "spec": {"type": "ClusterIP", "selector": labels, "ports": [port]},
        }
    )
    return found


def _pod(name: str, values: dict[str, Any]) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    if values["shmSize"]:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": values["shmSize"]}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    if values["files"]:
        volumes.append({"name": "files", "configMap": {"name": f"{name}-files"}})
    for i, path in enumerate(values["files"]):
        mounts.append({"name": "files", "mountPath": path, "subPath": f"file-{i}", "readOnly": True})
    for i, mount in enumerate(values["mounts"]):
        volumes.append({"name": f"host-{i}", "hostPath": {"path": mount["source"]}})
        mounts.append({"name": f"host-{i}", "mountPath": mount["target"], "readOnly": mount["readOnly"]})
    every = {**values["readyProbe"], "periodSeconds": _POLL_S, "timeoutSeconds": 30}
    container: dict[str, Any] = {"name": "engine", "image": values["image"], "imagePullPolicy": "IfNotPresent"}
    container |= {key: values[key] for key in ("command", "args", "workingDir") if values[key]}
    container["envFrom"] = [{"configMapRef": {"name": f"{name}-env"}}]
    if values["secretEnv"]:
        container["env"] = [
            {"name": each, "valueFrom": {"secretKeyRef": {"name": f"{name}-secrets", "key": each}}}
            for each in values["secretEnv"]
        ]
    container["ports"] = [{"name": "http", "containerPort": values["port"]}]
    if values["gpus"]:
        container["resources"] = {"limits": {"nvidia.com/gpu": values["gpus"]}}
    container |= {
        "startupProbe": {**every, "failureThreshold": values["startSeconds"] // _POLL_S},
        "readinessProbe": {**every, "periodSeconds": 30, "failureThreshold": 3},
        "livenessProbe": {
            "httpGet": {"path": values["livePath"], "port": "http"},
            "periodSeconds": _POLL_S,
            "timeoutSeconds": 10,
            "failureThreshold": 6,
        },
        # Endpoints forget the pod before the server stops to accept.
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", "sleep 5"]}}},
    }
    security: dict[str, Any] = {"privileged": True} if values["privileged"] else {"allowPrivilegeEscalation": False}
    if values["capAdd"]:
        security["capabilities"] = {"add": values["capAdd"]}
    if values["runAsUser"]:
        security["runAsUser"] = int(values["runAsUser"])
    container["securityContext"] = security
    if mounts:
        container["volumeMounts"] = mounts
    pod: dict[str, Any] = {
        # Otherwise every Service of the namespace becomes variables, some of which engines read as their own.
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": values["gracePeriodSeconds"],
    }
    if values["hostIPC"]:
        pod["hostIPC"] = True
    pod["containers"] = [container]
    if volumes:
        pod["volumes"] = volumes
    pod |= {key: values[key] for key in ("nodeSelector", "tolerations") if values[key]}
    return pod
