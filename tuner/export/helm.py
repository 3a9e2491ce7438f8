"""Helm values for a chart that comes with them: `helm install NAME ./chart`. It makes what `kubernetes` writes."""

from __future__ import annotations

from importlib.resources import files

from tuner.export.head import PLAIN, Options, comment
from tuner.export.kubernetes import head_of, pod_values
from tuner.export.provenance import Provenance
from tuner.export.yaml_text import dump
from tuner.records import LaunchRecord

CHART = ("Chart.yaml", "templates/configmap.yaml", "templates/deployment.yaml", "templates/service.yaml")


def render_helm(record: LaunchRecord, provenance: Provenance, options: Options = PLAIN) -> dict[str, str]:
    """File name → text: the values, and the chart that they are for.

    Raises:
        UsageError: for a record that a pod cannot express.
    """
    made, values = pod_values(record, provenance, options)
    head = [
        *head_of(made, record, provenance, "NAME"),
        "Install: helm install NAME ./chart. In args and command, `$$` is a plain `$`, and `$(NAME)` a variable.",
    ]
    source = files("tuner.export") / "chart"
    chart = {f"chart/{name}": (source / name).read_text(encoding="utf-8") for name in CHART}
    return {"chart/values.yaml": comment(head) + dump(values), **chart}
