"""`muster schedule` as a person uses it: pictures, files, JSON, comparisons, and errors."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import muster
from muster.cli.main import main
from muster.spec.schedules import SCHEDULES

PACKAGE = Path(muster.__file__).parent


@pytest.fixture
def schedule(capsys: pytest.CaptureFixture[str]):
    """Run `muster schedule` and return the exit code, standard output and standard error."""

    def run(line: str) -> tuple[int, str, str]:
        code = main(["schedule", *line.split()])
        return code, *capsys.readouterr()

    return run


OF_INTERLEAVED = {
    "name": "interleaved",
    "n_ranks": 2,
    "n_microbatches": 2,
    "stages": [
        {"index": 0, "depth": 0, "rank": 0, "replica": 0},
        {"index": 1, "depth": 1, "rank": 1, "replica": 0},
        {"index": 2, "depth": 2, "rank": 0, "replica": 0},
        {"index": 3, "depth": 3, "rank": 1, "replica": 0},
    ],
    "ranks": [
        ["0F0", "0F1", "2F0", "2F1", "2B0", "2B1", "0B0", "0B1"],
        ["1F0", "1F1", "3F0", "3B0", "3F1", "3B1", "1B0", "1B1"],
    ],
    "makespan": 7.5,
    "bubble": 1.5,
    "span_bubble": [1.5, 0.0],
    "peak_activation": [2.0, 1.5],
}


def test_json_is_one_object_key_by_key(schedule):
    code, out, errors = schedule("interleaved --ranks 2 --microbatches 2 --json")
    assert (code, errors, out.count("\n")) == (0, "", 1)
    assert json.loads(out) == OF_INTERLEAVED
    assert list(json.loads(out)) == list(OF_INTERLEAVED)


def test_times_are_of_a_rank_s_share_and_comm_is_between_ranks(schedule):
    _, out, _ = schedule("1f1b --ranks 4 --microbatches 16 --p2p-time 0.3 --json")
    assert (json.loads(out)["bubble"], json.loads(out)["makespan"]) == (17.4, 65.4)
    for chunks in (1, 2, 4):
        name = "interleaved" if chunks > 1 else "1f1b"
        _, out, _ = schedule(f"{name} --ranks 4 --microbatches 8 --vpp {chunks} --times 1,1.5,0.5 --json")
        data = json.loads(out)
        assert data["makespan"] - data["bubble"] == pytest.approx(8 * 3)
        assert data["bubble"] == pytest.approx(9 / chunks)


def test_vocabulary_passes_are_added_to_a_schedule(schedule):
    _, plain, _ = schedule("1f1b --ranks 4 --microbatches 16 --json")
    _, out, _ = schedule("1f1b --ranks 4 --microbatches 16 --vocab-parallel 0.4 --json")
    before, woven = json.loads(plain), json.loads(out)
    words = [
        {kind: sum(kind in action for action in order) for kind in ("S", "T", "EMB_W")} for order in woven["ranks"]
    ]
    assert words == [{"S": 16, "T": 16, "EMB_W": 16}] * 4
    own = [[action for action in order if action[1] in "FB"] for order in woven["ranks"]]
    assert [sorted(order) for order in own] == [sorted(order) for order in before["ranks"]]
    grown = woven["makespan"] - before["makespan"]
    own_words = 16 * (0.4 + 0.2 + 2 * 0.04)
    assert own_words - 1e-9 <= grown <= own_words + 2.5  # once, until the first scores are there
    peaks = zip(woven["peak_activation"], before["peak_activation"], strict=True)
    assert all(0 <= after - peak <= 1 for after, peak in peaks)
    slower = schedule("1f1b --ranks 4 --microbatches 16 --vocab-parallel 0.4 --p2p-time 0.1 --json")[1]
    assert json.loads(slower)["bubble"] > 9
    assert "logits" in schedule("zb-v --ranks 2 --microbatches 4 --vocab-parallel 0.5")[1]


def test_json_is_read_back_under_other_times(schedule, tmp_path):
    file = tmp_path / "own.json"
    file.write_text(json.dumps(OF_INTERLEAVED))
    assert schedule(f"--file {file} --json")[1] == schedule("interleaved --ranks 2 --microbatches 2 --json")[1]
    _, out, _ = schedule(f"--file {file} --times 2,2,2 --p2p-time 0.5 --json")
    assert json.loads(out)["makespan"] == 18.0


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "exact"])
def test_every_schedule_is_read_back(name, schedule, tmp_path):
    file = tmp_path / "own.json"
    file.write_text(schedule(f"{name} --ranks 4 --microbatches 12 --json")[1])
    code, out, errors = schedule(f"--file {file} --json")
    assert (code, errors) == (0, "")
    assert json.loads(out) == {key: value for key, value in json.loads(file.read_text()).items() if key in PRINTED}


PRINTED = {*OF_INTERLEAVED, "n_slices", "n_steps", "paths"}
"""Keys of a schedule of a file; a searched one's distance from the optimum isn't known."""

GRID = """\
1f1b: 2 ranks, 3 micro-batches
makespan 12, bubble 3 (25.0 % of it)
span bubble by rank: 3, 0
peak activations by rank: 2, 1

 F  forward   B  backward

0 F0F1....B0==F2B1==..B2==
1 ..F0B0==F1B1==F2B2==....
  0                     12
"""


def test_the_grid_in_letters(schedule):
    code, out, _ = schedule("1f1b --ranks 2 --microbatches 3")
    assert code == 0
    assert [line.rstrip() for line in out.splitlines()] == [line.rstrip() for line in GRID.splitlines()]


@pytest.mark.parametrize("line", ["gpipe --ranks 8 --microbatches 32", "interleaved --ranks 40 --microbatches 80"])
def test_long_schedules_fit_80_columns(schedule, line):
    _, out, _ = schedule(line)
    assert max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) < 70
    rows = re.findall(r"^ *\d+ ([A-Za-z.][\w.=~_-]*)$", out, re.MULTILINE)
    if "gpipe" in line:  # on several pages, every pass in full
        assert len(rows) == 5 * 8
        assert {f"F{index}" for index in range(32)} <= set(re.findall(r"F\d+", "".join(rows[::8])))
    else:  # on one page, letters alone, of some ranks
        assert len(rows) == 32
        assert set("".join(rows)) == set("FfBb.")
        assert "32 of 40 ranks are shown" in out


@pytest.mark.parametrize("colour", [True, False])
def test_colours_are_for_terminals(colour):
    variables = {"PYTHONPATH": str(PACKAGE.parent), "TERM": "xterm-256color", "COLUMNS": "80"}
    variables |= {"FORCE_COLOR": "1"} if colour else {"FORCE_COLOR": "1", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "muster", "schedule", "1f1b", "--ranks", "2", "--microbatches", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, timeout=300, check=True)
    assert ("\x1b[38;" in done.stdout) == colour
    assert "F0" in done.stdout


def test_svg_stands_by_itself(schedule, tmp_path):
    file = tmp_path / "picture.svg"
    assert schedule(f"interleaved --ranks 4 --microbatches 8 --svg {file}")[0] == 0
    root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    boxes = [path for path in root.iter(f"{space}path") if path.get("class") != "idle"]
    assert sum(path.attrib["d"].count("M") for path in boxes) == 4 * 2 * 2 * 8
    assert len({path.get("stroke") for path in boxes}) == 4  # two kinds, in full and pale
    numbers = [text.text for group in root.iter(f"{space}g") for text in group]
    assert sorted(numbers) == sorted(str(index) for index in range(8) for _ in range(4 * 2 * 2))
    assert "http" not in file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")


def test_trace_is_what_perfetto_opens(schedule, tmp_path):
    file = tmp_path / "trace.json"
    assert schedule(f"1f1b --ranks 2 --microbatches 3 --trace {file}")[0] == 0
    events = json.loads(file.read_text())["traceEvents"]
    passes = [event for event in events if event["ph"] == "X"]
    assert len(passes) == 2 * 2 * 3
    assert passes[3] == {
        "name": "0F2",
        "cat": "F",
        "ph": "X",
        "ts": 6e6,
        "dur": 1e6,
        "pid": 1,
        "tid": 1,
        "args": {"stage": 0, "micro_batch": 2},
    }
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"rank 0", "rank 1"}


def test_list_explains_each_in_a_line(schedule):
    code, out, _ = schedule("--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(SCHEDULES)
    for line in out.splitlines():
        assert "bubble" in line
        assert "memory" in line


def test_compare_prints_the_shortest_first_and_why_others_refuse(schedule):
    code, out, _ = schedule("--compare --ranks 4 --microbatches 8 --memory-limit 6")
    assert code == 0
    head, *rows = out.splitlines()
    assert head.split() == ["stages", "per", "rank", "makespan", "bubble", "part", "peak"]
    shown = [row.split() for row in rows if " is left out: " not in row]
    assert [float(row[2]) for row in shown] == sorted(float(row[2]) for row in shown)
    assert {row[0] for row in shown} >= {"interleaved", "1f1b"}
    assert (
        "gpipe is left out: gpipe keeps the activations of 8 micro-batches on rank 0, more than the limit of 6" in rows
    )
    refused = {row.partition(" ")[0] for row in rows if " is left out: " in row}
    assert {row[0] for row in shown} | refused == set(SCHEDULES)


SIZE = "--ranks 2 --microbatches 2"


@pytest.mark.parametrize(
    ("line", "code", "sentence"),
    [
        ("", 2, "expected one of NAME (such as 1f1b), --file FILE, --compare and --list"),
        ("1f1b --list", 2, "expected one of NAME"),
        ("1f1b --ranks 2", 2, "--microbatches is missing: expected the number of micro-batches"),
        ("--compare --microbatches 2", 2, "--ranks is missing: expected the number of ranks"),
        ("1f1b --ranks 2 --microbatches 0", 2, "--microbatches: expected a whole number >= 1, got '0'"),
        ("1f1b --ranks 2000 --microbatches 200000", 2, "are 400,000,000, too many to draw: expected at most 1,000,000"),
        ("auto --ranks 512 --microbatches 500", 2, "vpp are 1,024,000 (without --vpp, 4 is tried), too many to draw"),
        (f"auto-bidirectional {SIZE} --replicas 1", 3, "auto-bidirectional runs 2 copies of the model, got replicas 1"),
        (f"auto-bidirectional {SIZE} --replicas 3", 2, "--replicas 3: expected one of 1, 2"),
        (f"1f1a {SIZE}", 2, "unknown schedule '1f1a'; known: gpipe, 1f1b,"),
        (f"1f1b {SIZE} --times -1,1,1", 2, "--times: expected a number >= 0, got '-1'"),
        (f"1f1b {SIZE} --times 1,1", 2, "--times: expected three numbers F,I,W such as 1,1,1, got '1,1'"),
        (f"1f1b {SIZE} --times 0,0,0", 2, "--times: expected finite times that are not all 0, got '0,0,0'"),
        (f"1f1b {SIZE} --times one,1,1", 2, "--times: expected a number >= 0, got 'one'"),
        (f"1f1b {SIZE} --p2p-time -1", 2, "--p2p-time: expected a number >= 0, got '-1'"),
        (f"1f1b {SIZE} --memory-limit 1", 3, "1f1b keeps the activations of 2 micro-batches on rank 0, more than the"),
        (f"1f1b {SIZE} --memory-limit 0", 3, "memory_limit"),
        (f"1f1b {SIZE} --vpp 2", 3, "schedule 1f1b runs one stage per pipeline rank, got 2"),
        (f"1f1b {SIZE} --replicas 2", 3, "replicas"),
        (f"1f1b {SIZE} --fill", 2, "--fill is for 2bp-gpipe and 2bp-1f1b, not for 1f1b"),
        (f"1f1b {SIZE} --chunk 2", 2, "unknown flag '--chunk'; did you mean '--vpp'?"),
        (
            f"dualpipe {SIZE} --vocab-parallel 1",
            3,
            "vocabulary parallelism needs a schedule of one replica; dualpipe has 2",
        ),
        (
            "gis --ranks 4 --microbatches 8 --vocab-parallel 1 --memory-limit 4",
            3,
            "gis with vocabulary passes keeps 4.5 micro-batches' activations",
        ),
        (f"pipedream {SIZE} --vocab-parallel 1", 3, "doesn't go with pipedream, which has no flush after each step"),
        (
            "skippipe --ranks 4 --microbatches 8 --vocab-parallel 1",
            3,
            "with skippipe, whose micro-batches have paths of their own",
        ),
        (f"1f1b {SIZE} --vocab-parallel 1 --times 0,1,1", 2, "--vocab-parallel needs forwards that take time"),
        (f"1f1b {SIZE} --p2p-time 1e308", 2, "--p2p-time: expected a number >= 0 and below 1e+100, got '1e308'"),
        (f"exact {SIZE} --slices 2", 3, "schedule exact has no order for slices of sequences; those that have: gpipe"),
        (f"--compare {SIZE} --vocab-parallel 1", 2, "--vocab-parallel needs a schedule's name"),
        (
            f"--compare {SIZE} --json",
            2,
            "--json, --svg and --trace need a single schedule: leave out --list or --compare",
        ),
        (f"1f1b {SIZE} --svg /nowhere/at/all.svg", 2, "/nowhere/at/all.svg can't be written: there is no directory"),
        ("--file /nowhere", 2, "can't read /nowhere: No such file or directory"),
        ("--file /nowhere --ranks 2", 2, "--ranks is set by the file and can't be given too"),
        ("--file /nowhere --steps 2", 2, "--steps is set by the file and can't be given too"),
        ("--file /nowhere --skip 0.5", 2, "--skip is set by the file and can't be given too"),
        ("--file /nowhere --fill", 2, "--fill is set by the file and can't be given too"),
    ],
)
def test_a_wrong_request_gets_one_sentence(line, code, sentence, schedule):
    found, out, errors = schedule(line)
    assert (found, out) == (code, "")
    assert errors.count("\n") == 1
    assert sentence in errors


OWN = {
    "name": "own",
    "n_microbatches": 2,
    "stages": [{"index": stage, "depth": stage, "rank": stage, "replica": 0} for stage in (0, 1)],
    "ranks": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
}


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        ({"ranks": [["0F0", "0F1", "0B0"], OWN["ranks"][1]]}, 1, "0B1 is missing on rank 0"),
        ({"ranks": [["0F0", "0B0", "0B1"], OWN["ranks"][1]]}, 1, "0B1 on rank 0 has no 0F1 before it"),
        ({"ranks": [["0F1", "0B1", "0F0", "0B0"], OWN["ranks"][1]]}, 1, "0B1 on rank 0 waits for 1B1 on rank 1"),
        ({"ranks": [OWN["ranks"][0], ["1B0", "1F0", "1F1", "1B1"]]}, 1, "1B0 on rank 1 has no 1F0 before it"),
        ({"ranks": [[*OWN["ranks"][0], "1F0"], OWN["ranks"][1]]}, 1, "1F0 is on rank 0, but stage 1 lies on rank 1"),
        ({"stages": [OWN["stages"][0], OWN["stages"][1] | {"rank": 5}]}, 1, "stage 1 lies on rank 5, but the ranks"),
        ({"n_microbatches": 0}, 3, "num_micro_batches of at least 1, got 0"),
        ({"ranks": []}, 3, "num_ranks of at least 1, got 0"),
        ({"ranks": [["zero"], []]}, 2, "'zero' is not an action; one looks like 2F0"),
        ({"stages": [OWN["stages"][0]]}, 2, "has 1 stages, which can't be divided evenly among its ranks"),
        ({"stages": [OWN["stages"][0], OWN["stages"][0]]}, 2, "stages are numbered replica by replica"),
        ({"paths": [[0, 1]]}, 2, "1 path for 2 micro-batches, expected one for each"),
        ({"paths": [[0, 1], [0, 0, 1]]}, 2, "the path of micro-batch 1, 0.0.1, has a stage twice"),
        ({"paths": 3}, 2, "expected one object as 'muster schedule NAME --json' prints it"),
        ({"pair_share": "0.5"}, 2, "pair_share is '0.5', expected a number >= 0"),
        ({"n_microbatches": 2.7}, 2, "n_microbatches is 2.7, expected a whole number"),
        ({"paths": [[0, 1.7], [0, 1]]}, 2, "stage of a path is 1.7, expected a whole number"),
        ({"stages": [OWN["stages"][0] | {"rank": "0"}, OWN["stages"][1]]}, 2, "rank of a stage is '0', expected a"),
        ({"name": "1f1b", "n_steps": 2}, 2, "n_steps is 2, but schedule 1f1b has one step"),
        ({"n_microbatches": float("inf")}, 2, "n_microbatches is inf, expected a whole number"),
        ({"n_microbatches": 10**9}, 2, "has 2,000,000,000 stages × micro-batches: expected at most 1,000,000"),
        ({"stages": []}, 2, "it has no stages"),
        ({"n_ranks": 3}, 2, "n_ranks is 3, but 'ranks' has 2 orders of passes"),
        ({"ranks": 5}, 2, "expected one object as 'muster schedule NAME --json' prints it"),
    ],
)
def test_a_wrong_schedule_is_refused_by_the_name_of_its_action(change, code, sentence, schedule, tmp_path):
    file = tmp_path / "own.json"
    file.write_text(json.dumps(OWN | change))
    found, out, errors = schedule(f"--file {file}")
    assert (found, out, errors.count("\n")) == (code, "", 1)
    assert sentence in errors


def test_a_file_keeps_the_time_of_its_pairs(schedule, tmp_path):
    file = tmp_path / "pairs.json"
    written = schedule("dualpipe --ranks 4 --microbatches 8 --pair-time 1.5 --json")[1]
    file.write_text(written)
    assert schedule(f"--file {file} --json")[1] == written
    assert schedule(f"--file {file} --pair-time 1.5 --json")[1] == written
    slower = json.loads(schedule(f"--file {file} --pair-time 3 --json")[1])
    assert slower["makespan"] > json.loads(written)["makespan"]
    file.write_text(json.dumps(OWN))
    code, _, errors = schedule(f"--file {file} --pair-time 1.5")
    assert (code, errors.count("\n")) == (2, 1)
    assert "has no pairs; 'muster schedule dualpipe --pair-time T' makes them" in errors


def test_a_file_without_a_key_says_which(schedule, tmp_path):
    file = tmp_path / "own.json"
    file.write_text("{}")
    assert schedule(f"--file {file}")[2] == f"muster: {file} is not a schedule: key 'stages' is missing\n"
