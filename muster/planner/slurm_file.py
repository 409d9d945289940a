"""Batch file for Slurm: a launcher on each node; unequal nodes are components of a heterogeneous job."""

from muster.planner.launch_spec import LaunchSpec, NodeKind


def slurm_files(spec: LaunchSpec) -> dict[str, str]:
    """Return the batch file, name → text."""
    file = f"{spec.name}.sbatch"
    lines = [*_site_lines(spec, file), "", *_directives(spec), "set -euo pipefail", "", *_nodes(spec), *_launch(spec)]
    return {file: "\n".join([*lines, *_srun(spec), ""])}


def _site_lines(spec: LaunchSpec, file: str) -> list[str]:
    """Return the lines that differ from site to site."""
    return [
        "#!/usr/bin/env bash",
        f"# For your site (a line with ## is off). Flags win over them: sbatch --partition=P --time=T {file}",
        *(["##SBATCH --partition=PARTITION"] if len(spec.node_kinds) == 1 else []),
        "##SBATCH --account=ACCOUNT",
        "#SBATCH --time=24:00:00",
    ]


def _directives(spec: LaunchSpec) -> list[str]:
    """Return what the job asks for, component by component."""
    job = [
        f"#SBATCH --job-name={spec.name}",
        "#SBATCH --output=%x-%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --signal=TERM@120",
    ]
    if len(spec.node_kinds) == 1:
        return [*job, *_component(spec.node_kinds[0], "")]
    lines = [
        *job,
        "# One component for each kind of node. Partitions and GPU types have the site's names: sinfo -o '%P %G'",
    ]
    for index, kind in enumerate(spec.node_kinds):
        partition = f"##SBATCH --partition=PARTITION_OF_{kind.device.upper().replace('-', '_')}"
        lines += [*(["#SBATCH hetjob"] if index else []), partition, *_component(kind, f"{_gpu_type(kind)}:")]
    return lines


def _component(kind: NodeKind, gpu_type: str) -> list[str]:
    """Return the directives for nodes of one kind: all memory and all cores of each."""
    return [
        f"#SBATCH --nodes={kind.num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={gpu_type}{kind.devices_per_node}"] if kind.has_gpus else []),
        "#SBATCH --mem=0",
        "#SBATCH --exclusive",
    ]


def _gpu_type(kind: NodeKind) -> str:
    """Return the usual name of a GPU's type in gres.conf: h100 for h100-sxm."""
    return kind.device.split("-")[0]


def _nodes(spec: LaunchSpec) -> list[str]:
    """Return the lines that find the first node and, where Slurm's order isn't the plan's, each node's rank.

    Slurm sorts the nodes of a component by name, which is taken for the order in which the cluster lists them.
    """
    if spec.num_nodes == 1:
        return []
    if spec.ranks_as_listed:
        return [
            'first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export first_node",
            "",
        ]
    listed_ranks = [rank for kind in spec.node_kinds for rank in kind.node_ranks]
    order = sorted(range(spec.num_nodes), key=listed_ranks.__getitem__)
    return [
        "mapfile -t nodes < <(",
        *(f'  scontrol show hostnames "${variable}"' for variable in _variables(spec, "SLURM_JOB_NODELIST")),
        ")",
        "# The plan's ranks are laid on the nodes in this order.",
        "by_rank=()",
        f'for node in {" ".join(map(str, order))}; do by_rank+=("${{nodes[node]}}"); done',
        "export first_node=${by_rank[0]} nodes_by_rank=${by_rank[*]}",
        "",
    ]


def _launch(spec: LaunchSpec) -> list[str]:
    """Return the function that each node runs."""
    rank, find_rank = "$SLURM_NODEID", []
    if spec.num_nodes > 1 and not spec.ranks_as_listed:
        rank = "$rank"
        find_rank = [
            "  local rank=0 node",
            "  for node in $nodes_by_rank; do",
            '    if [ "$node" = "$SLURMD_NODENAME" ]; then break; fi',
            "    rank=$((rank + 1))",
            "  done",
        ]
    command = spec.launcher('"$first_node"', f'"{rank}"')
    return ["launch() {", *find_rank, f"  exec {command}", "}", ""]


def _srun(spec: LaunchSpec) -> list[str]:
    """Return the lines that start the launchers with all cores of their nodes, and requeue a run that was stopped.

    srun doesn't take the CPUs of a task from the job (Slurm 22.05 and later): without `--cpus-per-task` the launcher
    and all its ranks would share one core.
    """
    variables = _variables(spec, "SLURM_JOB_CPUS_PER_NODE")
    steps = []
    for index, variable in enumerate(variables):
        group = f"--het-group={index} " if len(variables) > 1 else ""
        cpus = f'--cpus-per-task="${{{variable}%%[(,]*}}"'
        steps.append(f'{group}{cpus} --cpu-bind=none --kill-on-bad-exit=1 bash -c "$(declare -f launch); launch"')
    return [
        "# A launcher on each node starts a process for each device. A stopped run saves and ends with 75: resume it.",
        "status=0",
        "srun " + " : \\\n  ".join(steps) + " || status=$?",
        'if [ "$status" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "$status"',
    ]


def _variables(spec: LaunchSpec, name: str) -> list[str]:
    """Return the names of a variable of Slurm for each component."""
    count = len(spec.node_kinds)
    return [name] if count == 1 else [f"{name}_HET_GROUP_{index}" for index in range(count)]
