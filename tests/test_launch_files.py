"""Launch files: what they ask for, that their tools accept them, and that each node gets the rank of the plan."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from kubernetes_validate import ValidationError

from muster.cli.plan import _write
from muster.config.cluster_files import load_cluster
from muster.config.load_config import load_plan
from muster.config.named_model import load_model
from muster.planner.heterogeneous import PlanSearch
from muster.planner.launch_files import LAUNCHERS, check_launch, render_launch_files
from muster.planner.launch_spec import LaunchSpec, NodeKind, launch_spec_of
from muster.planner.node_order import reorder_nodes
from muster.spec.errors import InfeasibleError
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from tests.launch_linters import check_kubernetes, check_sbatch, kubernetes_objects, shellcheck

WORDS = ("big", "run.yaml", "plan.yaml")
CASES = {
    "one node": ("8xh100", ()),
    "alike": ("32xh100", ()),
    "reordered": ("32xh100", (2, 0, 3, 1)),
    "two kinds": ("16xh100+16xa100", (2, 3, 1, 0)),
    "two kinds as listed": ("16xh100+16xa100", (0, 1, 2, 3)),
    "kinds interleaved": ("8xh100+16xa100+8xh100", (3, 1, 0, 2)),
}
"""Clusters, and the listed nodes in the order of their ranks."""


def job_of(case: str) -> LaunchSpec:
    """Return the job of a case of `CASES`."""
    name, order = CASES[case]
    cluster = load_cluster(name)
    return launch_spec_of(Plan(dp_shard=cluster.num_devices), cluster, *WORDS, order)


def file_of(kind: str, job: LaunchSpec) -> str:
    """Return the one file of a job."""
    ((_, text),) = render_launch_files(kind, job).items()
    return text


def listed_kinds(case: str) -> list[str]:
    """Return the device of each listed node."""
    groups = load_cluster(CASES[case][0]).groups
    return [group.device.name for group in groups for _ in range(group.num_nodes)]


def rank_by_node(case: str) -> list[int]:
    """Return each listed node's rank under the plan."""
    order = CASES[case][1] or range(len(listed_kinds(case)))
    return [list(order).index(node) for node in range(len(order))]


def test_the_files_name_the_nodes_and_the_plan() -> None:
    job = job_of("alike")
    for kind in LAUNCHERS:
        ((name, text),) = render_launch_files(kind, job).items()
        assert "muster train run.yaml --parallel plan.yaml" in text
        assert "--nproc-per-node 8" in text if kind == "torchrun" else "--nproc 8" in text
        assert name.startswith(("big", "start"))
    assert yaml.safe_load(file_of("skypilot", job))["resources"]["accelerators"] == "H100:8"
    for kind in ("torchrun", "skypilot"):
        assert "in this order of those listed: 2 0 3 1." in file_of(kind, job_of("reordered"))
    assert '--node-rank "$2"' in file_of("torchrun", job_of("reordered"))


def lint(kind: str, text: str, tmp_path: Path) -> None:
    """Check a file by the tools of its kind, the commands inside it too."""
    if kind == "kubernetes":
        check_kubernetes(text)
        _, *jobs = kubernetes_objects(text)
        scripts = [job["spec"]["template"]["spec"]["containers"][0]["command"][2] for job in jobs]
    else:
        scripts = [yaml.safe_load(text)["run"] if kind == "skypilot" else text]
    if kind == "slurm":
        check_sbatch(text, tmp_path)
    for script in scripts:
        shellcheck(script, tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_the_tool_of_each_kind_accepts_the_files(case: str, tmp_path: Path) -> None:
    job = job_of(case)
    for kind in LAUNCHERS:
        if kind != "skypilot" or len(job.node_kinds) == 1:
            lint(kind, file_of(kind, job), tmp_path)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("slurm", "--mem=0", "--memory=0"),
        ("slurm", "--time=24:00:00", "--time=a day"),
        ("slurm", "--nodes=4", "--nodes=four"),
        ("slurm", '"$first_node"', "$first_node"),
        ("kubernetes", "parallelism", "paralelism"),
        ("kubernetes", "completions: 4", "completions: four"),
        ("kubernetes", "subdomain: big", "subdomain: [big]"),
    ],
)
def test_the_tools_find_seeded_errors(kind: str, right: str, wrong: str, tmp_path: Path) -> None:
    text = file_of(kind, job_of("alike"))
    broken = text.replace(right, wrong)
    assert broken != text
    with pytest.raises((AssertionError, ValidationError)):
        lint(kind, broken, tmp_path)


def test_slurm_is_asked_for_whole_nodes_and_all_their_cores(tmp_path: Path) -> None:
    text = file_of("slurm", job_of("alike"))
    (component,) = check_sbatch(text, tmp_path)
    asked = {"nodes": "4", "ntasks-per-node": "1", "gpus-per-node": "8", "mem": "0", "exclusive": ""}
    assert component.items() >= asked.items()
    assert '--cpus-per-task="${SLURM_JOB_CPUS_PER_NODE%%[(,]*}" --cpu-bind=none' in text
    assert "--partition=" in text.splitlines()[2]
    assert text.splitlines()[4] == "#SBATCH --time=24:00:00"


def test_unequal_nodes_are_components_in_the_order_of_the_list(tmp_path: Path) -> None:
    components = check_sbatch(file_of("slurm", job_of("two kinds")), tmp_path)
    assert [(one["nodes"], one["gpus-per-node"]) for one in components] == [("2", "h100:8"), ("2", "a100:8")]
    components = check_sbatch(file_of("slurm", job_of("kinds interleaved")), tmp_path)
    assert [(one["nodes"], one["gpus-per-node"]) for one in components] == [("2", "h100:8"), ("2", "a100:8")]


def test_an_answer_for_nodes_in_another_order_is_launched_on_the_listed_ones(tmp_path: Path) -> None:
    order, plan = CASES["two kinds"][1], parse_plan_name("dp16-pp2-l10.22")
    request = SimpleNamespace(
        cluster=reorder_nodes(load_cluster("16xh100+16xa100"), order),
        model=load_model("gpt2"),
        workload=Workload(seq_len=1024, global_batch_size=64),
    )
    result = SimpleNamespace(best=[SimpleNamespace(plan=plan)], evaluator=SimpleNamespace(request=request))
    answer = SimpleNamespace(result=result, search=PlanSearch(result, order), request=request)  # type: ignore[arg-type]
    args = SimpleNamespace(output=tmp_path / "plan.yaml", launch="slurm", run_file=None)
    plan_file, job_file = _write(args, answer)  # type: ignore[arg-type]
    components = check_sbatch(job_file.read_text(), tmp_path)
    assert [(one["nodes"], one["gpus-per-node"]) for one in components] == [("2", "h100:8"), ("2", "a100:8")]
    assert "for node in 2 3 1 0;" in job_file.read_text()
    assert "2,3,1,0 (--node-order of muster predict)" in plan_file.read_text()
    assert load_plan(plan_file) == plan


FAKE_SCONTROL = """#!/usr/bin/env bash
[ "$1 $2" = "show hostnames" ] || exit 1
tr , '\\n' <<< "$3"
"""
FAKE_SRUN = """#!/usr/bin/env python3
import os, subprocess, sys
steps, rest = [[]], sys.argv[1:]
for word in rest:
    steps.append([]) if word == ":" else steps[-1].append(word)
number = 0
for step in steps:
    group = next((word.split("=")[1] for word in step if word.startswith("--het-group")), None)
    suffix = "" if group is None else "_HET_GROUP_" + group
    command = step[step.index("bash"):]
    cpus = next(word.split("=")[1] for word in step if word.startswith("--cpus-per-task"))
    for node in os.environ["SLURM_JOB_NODELIST" + suffix].split(","):
        place = {"SLURMD_NODENAME": node, "SLURM_NODEID": str(number), "SLURM_CPUS_PER_TASK": cpus}
        subprocess.run(command, check=True, env={**os.environ, **place})
        number += 1
"""
FAKE_MUSTER = """#!/usr/bin/env bash
echo "$SLURMD_NODENAME $SLURM_CPUS_PER_TASK $*"
"""


@pytest.mark.parametrize("case", [case for case in CASES if case != "one node"])
def test_slurm_gives_each_node_the_rank_that_the_plan_wants(case: str, tmp_path: Path) -> None:
    """The batch file runs with stand-ins for Slurm's commands; nodes are sorted by name, as Slurm does."""
    devices = listed_kinds(case)
    names = [f"{device}-{number}" for number, device in enumerate(devices)]
    groups = [",".join(name for name in names if name.startswith(f"{device}-")) for device in dict.fromkeys(devices)]
    environment = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": groups[0], "SLURM_JOB_CPUS_PER_NODE": "96(x4)"}
    if len(groups) > 1:
        for index, group in enumerate(groups):
            environment[f"SLURM_JOB_NODELIST_HET_GROUP_{index}"] = group
            environment[f"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_{index}"] = f"{64 + index}(x2)"
    printed = _run_with_stand_ins(file_of("slurm", job_of(case)), environment, tmp_path)
    found = {}
    for line in printed.splitlines():
        place = re.fullmatch(r"(\S+) (\d+) train .* --node-rank (\d+) --rendezvous (\S+):29400", line)
        assert place is not None, line
        found[place[1]] = int(place[3])
        assert place[2] == str(96 if len(groups) == 1 else 64 + list(dict.fromkeys(devices)).index(place[1][:-2]))
        assert place[4] == names[rank_by_node(case).index(0)]
    assert found == dict(zip(names, rank_by_node(case), strict=True))


def _run_with_stand_ins(script: str, environment: dict[str, str], tmp_path: Path) -> str:
    for name, text in {"scontrol": FAKE_SCONTROL, "srun": FAKE_SRUN, "muster": FAKE_MUSTER}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, **environment, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("case", [case for case in CASES if case != "one node"])
def test_pods_have_the_ranks_that_the_plan_wants(case: str, tmp_path: Path) -> None:
    service, *jobs = kubernetes_objects(file_of("kubernetes", job_of(case)))
    devices, ranks = listed_kinds(case), rank_by_node(case)
    assert len(jobs) == len(set(devices))
    hosts = {}
    for job, device in zip(jobs, dict.fromkeys(devices), strict=True):
        pod = job["spec"]["template"]["spec"]
        wanted = [rank for rank, each in zip(ranks, devices, strict=True) if each == device]
        assert job["spec"]["completions"] == job["spec"]["parallelism"] == len(wanted)
        assert job["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
        assert ("nodeSelector" in pod) == (len(jobs) > 1)
        for index, rank in enumerate(wanted):
            command = pod["containers"][0]["command"][2].replace("exec ", "echo ")
            shown = subprocess.run(
                ["bash", "-c", command], env={"JOB_COMPLETION_INDEX": str(index)}, capture_output=True, text=True
            ).stdout
            place = re.search(r"--node-rank (\d+) --rendezvous (\S+):29400", shown)
            assert place is not None, shown
            assert int(place[1]) == rank
            hosts[rank] = f"{job['metadata']['name']}-{index}.{pod['subdomain']}"
            first = place[2]
    assert first == hosts[0]


def test_pods_ask_for_the_network_cards_of_their_nodes() -> None:
    for device, resource in (("h100", {"rdma/hca": 1}), ("cpu", None)):
        cluster = load_cluster(f"16x{device}")
        _, job = kubernetes_objects(file_of("kubernetes", launch_spec_of(Plan(dp_shard=16), cluster, *WORDS)))
        container = job["spec"]["template"]["spec"]["containers"][0]
        if resource is None:
            assert "resources" not in container
        else:
            assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, **resource}
            assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    aws = load_cluster("16xh100").groups[0].nics
    assert aws is not None
    adapters = aws.model_copy(update={"link": aws.link.model_copy(update={"name": "efa-400g", "kind": "ethernet"})})
    nodes = NodeKind("h100-sxm", 8, nics=adapters, node_ranks=(0, 1))
    _, job = kubernetes_objects(file_of("kubernetes", LaunchSpec(*WORDS, (nodes,))))
    limits = job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": adapters.count}


def test_what_differs_from_site_to_site_stands_once_at_the_top() -> None:
    text = file_of("kubernetes", job_of("two kinds"))
    for name in (
        "IMAGE_WITH_MUSTER",
        "muster-work",
        "rdma/hca",
        "GPU_PRODUCT_OF_H100_SXM",
        "GPU_PRODUCT_OF_A100_80_SXM",
    ):
        assert text.count(name) == 1
        assert name in text[: text.index("kind: Job")]


def test_odd_paths_are_held_together_and_names_are_hosts() -> None:
    odd = "my run's file.yaml"
    job = launch_spec_of(
        Plan(dp_shard=32), load_cluster("32xh100"), "muster-Llama_3.1 8B'" + "x" * 60, odd, "a b/plan.yaml"
    )
    assert re.fullmatch("[a-z][a-z0-9-]{0,49}", job.name)
    for kind in LAUNCHERS:
        text = file_of(kind, job)
        if kind == "kubernetes":
            text = kubernetes_objects(text)[1]["spec"]["template"]["spec"]["containers"][0]["command"][2]
        elif kind == "skypilot":
            text = yaml.safe_load(text)["run"]
        else:
            (text,) = (line for line in text.splitlines() if " train " in line)
        words = shlex.split(text)
        begin = words.index("muster")
        assert words[begin : begin + 5] == ["muster", "train", odd, "--parallel", "a b/plan.yaml"]


def test_the_files_ask_for_what_the_nodes_have() -> None:
    amd, cores = (launch_spec_of(Plan(dp_shard=16), load_cluster(f"16x{name}"), *WORDS) for name in ("mi300x", "cpu"))
    assert "amd.com/gpu: 8" in file_of("kubernetes", amd)
    for kind in LAUNCHERS:
        assert "gpu" not in file_of(kind, cores).lower()
    with pytest.raises(InfeasibleError, match="but these have a100-80-sxm and h100-sxm"):
        check_launch("skypilot", load_cluster("8xh100+8xa100"))


@pytest.mark.parametrize("case", ["one node", "alike"])
def test_the_commands_are_those_that_train_takes(case: str) -> None:
    from muster.cli import train
    from muster.cli.node_flags import nodes_request

    for kind in ("slurm", "kubernetes", "skypilot"):
        text = file_of(kind, job_of(case)).replace('\\"', '"')
        found = re.search(r"muster (train run.yaml .*?)(\"\]|\n|$)", text)
        assert found is not None, text
        words = re.sub(r'"\$\(echo .*?\)"|"\$first_node"', "node-0", found[1])
        words = re.sub(r"\$(SLURM_NODEID|JOB_COMPLETION_INDEX|SKYPILOT_NODE_RANK)\b", "3", words)
        args, _ = train._parse(shlex.split(words)[1:])
        place = nodes_request(args)
        assert (str(args.file), args.parallel, str(args.run), args.nproc) == ("run.yaml", "plan.yaml", "runs/big", 8)
        if case == "one node":
            assert place is None
        else:
            assert place is not None
            assert (place.num_nodes, place.node_rank, place.port) == (4, 3, 29400)
            assert place.host in ("node-0", "big-0.big")
