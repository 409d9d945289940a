"""Manifest for Kubernetes: an indexed Job for each kind of node, and a Service that gives their pods host names."""

import json
import re

from muster.planner.launch_spec import LaunchSpec, NodeKind
from muster.spec.device import Nics

RUN_LABEL = "muster/run"
"""Label that all pods of a run have."""


def kubernetes_files(spec: LaunchSpec) -> dict[str, str]:
    """Return the manifest, name → text.

    It is one list, so that YAML's anchors reach all of it: what differs from site to site stands once, at the top.
    """
    jobs = [_job(spec, index) for index in range(len(spec.node_kinds))]
    return {f"{spec.name}.yaml": f"apiVersion: v1\nkind: List\nitems:\n{_service(spec)}{''.join(jobs)}"}


def _service(spec: LaunchSpec) -> str:
    """Return the Service; its annotations name what differs from site to site."""
    site = {"image": "IMAGE_WITH_MUSTER", "claim": "muster-work"}
    site |= {f"rdma-{index}": name for index, name in enumerate(_rdma_names(spec))}
    if len(spec.node_kinds) > 1:
        site |= {f"nodes-{index}": _placeholder(kind) for index, kind in enumerate(spec.node_kinds)}
    lines = "\n".join(f"      muster/{key}: &{key} {value}" for key, value in site.items())
    order = ""
    if spec.node_order:
        order = "# Pod i of a Job is node i of its kind in the cluster's list: pin the pods where links differ.\n"
    return f"""{order}- apiVersion: v1
  kind: Service
  metadata:
    name: {spec.name}
    annotations:  # for your site; the rest refers to these
{lines}
  spec:
    clusterIP: None
    publishNotReadyAddresses: true
    selector: {{{RUN_LABEL}: {spec.name}}}
"""


def _job(spec: LaunchSpec, index: int) -> str:
    """Return the Job for the nodes of one kind."""
    kind = spec.node_kinds[index]
    selector = f"        nodeSelector: {{{_node_label(kind)}: *nodes-{index}}}\n" if len(spec.node_kinds) > 1 else ""
    return f"""- apiVersion: batch/v1
  kind: Job
  metadata:
    name: {_job_name(spec, index)}
  spec:
    completionMode: Indexed
    completions: {kind.num_nodes}
    parallelism: {kind.num_nodes}
    backoffLimit: {3 * kind.num_nodes}
    template:
      metadata:
        labels: {{{RUN_LABEL}: {spec.name}}}
      spec:
        subdomain: {spec.name}
        restartPolicy: Never
        terminationGracePeriodSeconds: 300
{selector}        containers:
        - name: muster
          image: *image
          workingDir: /work
          command: [bash, -c, {json.dumps(_command(spec, kind))}]
{_resources(spec, kind)}          volumeMounts:
          - {{name: work, mountPath: /work}}
          - {{name: shm, mountPath: /dev/shm}}
        volumes:
        - name: work
          persistentVolumeClaim: {{claimName: *claim}}
        - name: shm
          emptyDir: {{medium: Memory}}
"""


def _resources(spec: LaunchSpec, kind: NodeKind) -> str:
    """Return the devices and network cards of a container; RDMA pins memory, which takes a capability."""
    limits = [f"{_device_resource(kind.device)}: {kind.devices_per_node}"] if kind.has_gpus else []
    security = ""
    rdma = rdma_resource(kind.nics) if spec.num_nodes > 1 else None
    if rdma:
        security = "          securityContext: {capabilities: {add: [IPC_LOCK]}}\n"
        limits.append(f"*rdma-{_rdma_names(spec).index(rdma[0])} : {rdma[1]}")
    if not limits:
        return ""
    return (
        security + "          resources:\n            limits:\n" + "".join(f"              {row}\n" for row in limits)
    )


def rdma_resource(nics: Nics | None) -> tuple[str, int] | None:
    """Return name and number of the resource that gives a pod the RDMA cards of its node; None without such cards.

    One `rdma/hca` of the shared device plugin opens all cards of its pool; AWS's plugin counts adapters.
    """
    if nics is None:
        return None
    if nics.link.name.startswith("efa"):
        return "vpc.amazonaws.com/efa", nics.count
    return ("rdma/hca", 1) if nics.link.kind in ("infiniband", "roce") else None


def _rdma_names(spec: LaunchSpec) -> list[str]:
    """Return the RDMA resources of all kinds of nodes, each once."""
    found = (rdma_resource(kind.nics) for kind in spec.node_kinds if spec.num_nodes > 1)
    return list(dict.fromkeys(rdma[0] for rdma in found if rdma))


def _command(spec: LaunchSpec, kind: NodeKind) -> str:
    """Return the command of a pod; its index among the pods of its Job says which node it is."""
    rank, table = "$JOB_COMPLETION_INDEX", ""
    if not spec.ranks_as_listed:
        rank = "${ranks[JOB_COMPLETION_INDEX]}"
        table = f"ranks=({' '.join(map(str, kind.node_ranks))}); "
    return table + "exec " + spec.launcher(_first_pod(spec), f'"{rank}"')


def _first_pod(spec: LaunchSpec) -> str:
    """Return the host name of the pod with rank 0."""
    index, kind = next((index, kind) for index, kind in enumerate(spec.node_kinds) if 0 in kind.node_ranks)
    return f"{_job_name(spec, index)}-{kind.node_ranks.index(0)}.{spec.name}"


def _job_name(spec: LaunchSpec, index: int) -> str:
    return spec.name if len(spec.node_kinds) == 1 else f"{spec.name}-{index}"


def _device_resource(device: str) -> str:
    """Return the name of the resource that the vendor's device plugin offers."""
    return "google.com/tpu" if device.startswith("tpu") else f"{'amd' if device[:2] == 'mi' else 'nvidia'}.com/gpu"


def _node_label(kind: NodeKind) -> str:
    """Return the label by which the vendor's operator tells nodes of one device from others."""
    if not kind.has_gpus:
        return "node.kubernetes.io/instance-type"
    if kind.device.startswith("tpu"):
        return "cloud.google.com/gke-tpu-accelerator"
    return "amd.com/gpu.product-name" if kind.device.startswith("mi") else "nvidia.com/gpu.product"


def _placeholder(kind: NodeKind) -> str:
    """Return what stands for a label's value until the reader has looked it up."""
    label = _node_label(kind).split("/")[1]
    return re.sub("[^A-Z0-9]", "_", f"{label}_of_{kind.device}".upper())
