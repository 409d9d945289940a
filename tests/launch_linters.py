"""Checks of launch files by the tools of their kind: shellcheck, the schemas of Kubernetes, the options of sbatch."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import yaml

KUBERNETES_VERSION = "1.36"

SBATCH_OPTIONS = {
    "account": r"\S+",
    "exclusive": None,
    "gpus-per-node": r"(\w+:)?\d+",
    "job-name": r"\S+",
    "mem": r"\d+[KMGT]?",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "open-mode": "append|truncate",
    "output": r"\S+",
    "partition": r"[\w,-]+",
    "requeue": None,
    "signal": r"([RB]{1,2}:)?(TERM|INT|USR1|USR2|\d+)(@\d+)?",
    "time": r"(\d+-)?\d+(:\d\d){0,2}",
}
"""Options of `man sbatch` that the files use, with the pattern of the value; None: the option has none."""


def shellcheck(script: str, tmp_path: Path) -> None:
    """Fail on any complaint of shellcheck, notes on style included.

    SC2329 (a function that is never called) is left out: srun calls it, by the text that `declare -f` prints.
    """
    path = tmp_path / "script.sh"
    path.write_text(script)
    program = Path(sys.executable).with_name("shellcheck")
    command = [str(program), "--shell=bash", "--exclude=SC2329", "--severity=style", str(path)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def check_kubernetes(text: str) -> None:
    """Compare each object of a manifest with its schema; unknown fields are errors."""
    for each in kubernetes_objects(text):
        kubernetes_validate.validate(each, KUBERNETES_VERSION, strict=True)


def kubernetes_objects(text: str) -> list[dict]:
    """Return the objects of a manifest, which is one list."""
    (manifest,) = yaml.safe_load_all(text)
    assert (manifest["apiVersion"], manifest["kind"]) == ("v1", "List")
    return json.loads(json.dumps(manifest["items"]))


def check_sbatch(text: str, tmp_path: Path) -> list[dict[str, str]]:
    """Return the directives of each component, after comparing them with the options that sbatch has.

    sbatch reads directives up to the first command. Where sbatch itself is installed, it parses the file too.
    """
    lines = text.splitlines()
    assert lines[0].startswith("#!")
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first_command:])
    components: list[dict[str, str]] = [{}]
    for line in lines[:first_command]:
        if line == "#SBATCH hetjob":
            components.append({})
        elif line.startswith("#SBATCH"):
            found = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line)
            assert found, line
            name, value = found.groups()
            assert name in SBATCH_OPTIONS, line
            pattern = SBATCH_OPTIONS[name]
            assert value is None if pattern is None else re.fullmatch(pattern, value or ""), line
            assert name not in components[-1], f"{line} repeats an option"
            components[-1][name] = value or ""
    if shutil.which("sbatch"):
        _parse_with_sbatch(text, tmp_path)
    return components


def _parse_with_sbatch(text: str, tmp_path: Path) -> None:
    """Let sbatch read a file; it gets no further than a controller that isn't there."""
    config, script = tmp_path / "slurm.conf", tmp_path / "job.sbatch"
    plugins = os.environ.get("SLURM_PLUGIN_DIR")
    config.write_text(
        "ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nMessageTimeout=1\nAuthType=auth/none\n"
        "GresTypes=gpu\n" + (f"PluginDir={plugins}\n" if plugins else "")
    )
    script.write_text(text)
    environment = {**os.environ, "SLURM_CONF": str(config)}
    found = subprocess.run(["sbatch", "--test-only", str(script)], capture_output=True, text=True, env=environment)
    assert not re.search(r"unrecognized|invalid|Invalid|unknown|ambiguous", found.stderr), found.stderr
