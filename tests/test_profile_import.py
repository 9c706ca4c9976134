"""Importing tables: points, faults by row and column, and the command line."""

import json
from pathlib import Path

import pytest

from harness.cli import main
from harness.core import ScenarioError
from harness.profile import PrefillPoint
from harness.profile_file import load_profile
from harness.profile_import.tables import TableReading, read_decode_table, read_prefill_table

PROFILES = Path(__file__).parent.parent / "profiles"
PLAIN = TableReading("measured", "bench of 3 May", {}, {})
GOOD = "new_tokens,cached_tokens,prefill_ms\n4096,0,90\n512,0,30\n512,8192,40\n4096,8192,120\n"


def table(folder: Path, text: str, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_csv_table_is_read_in_any_order_of_rows(tmp_path: Path) -> None:
    points = read_prefill_table(table(tmp_path, GOOD), PLAIN)
    assert [(p.new_tokens, p.cached_tokens, p.prefill_s) for p in points] == [
        (512, 0, 0.03), (4096, 0, 0.09), (512, 8192, 0.04), (4096, 8192, 0.12),
    ]  # fmt: skip
    assert {(p.provenance, p.source) for p in points} == {("measured", "bench of 3 May")}


def test_json_mapped_columns_chosen_rows_and_own_sources(tmp_path: Path) -> None:
    rows = [
        {"n": 100, "latency": 0.5, "gpu": "a", "how": "published", "source": "report 1"},
        {"n": 200, "latency": "0.75", "gpu": "a", "how": "measured", "source": "lab"},
        {"n": 100, "latency": 9, "gpu": "b", "how": "measured", "source": "lab"},
    ]
    columns = {"new_tokens": "n", "ttft_s": "latency", "provenance": "how"}
    reading = TableReading("measured", "unused", columns, {"gpu": "a"})
    path = table(tmp_path, json.dumps(rows), "t.json")
    assert read_prefill_table(path, reading) == (
        PrefillPoint(100, 0, 0.5, "published", "report 1"),
        PrefillPoint(200, 0, 0.75, "measured", "lab"),
    )


@pytest.mark.parametrize(("column", "unit_s"), [("step_s", 1.0), ("tpot_ms", 1e-3)])
def test_decode_points_in_either_unit(tmp_path: Path, column: str, unit_s: float) -> None:
    text = f"batch,context_tokens,{column}\n8,1024,11\n1,1024,9\n1,8192,10\n"
    points = read_decode_table(table(tmp_path, text), PLAIN)
    assert [(p.batch, p.context_tokens, p.step_s / unit_s) for p in points] == [
        (1, 1024, pytest.approx(9)), (1, 8192, pytest.approx(10)), (8, 1024, pytest.approx(11)),
    ]  # fmt: skip


#: A prefill table and what its refusal must say.
BAD_TABLES = {
    GOOD.replace("prefill_ms", "prefill"): ["one time column", "prefill_s", "none is", "--column"],
    GOOD.replace("cached_tokens", "prefill_s"): ["'prefill_s' and 'prefill_ms'"],
    GOOD.replace("new_tokens", "tokens"): ["no column 'new_tokens'", "--column new_tokens=NAME"],
    GOOD.replace("cached_tokens", "cached_token"): ["'cached_token'", "no 'cached_tokens'"],
    GOOD.replace("512,0,30", "512,0,nan"): ["line 3", "'prefill_ms'", "'nan'", "finite"],
    GOOD.replace("512,0,30", "512,0,inf"): ["line 3", "'prefill_ms'", "'inf'"],
    GOOD.replace("512,0,30", "512,0,0"): ["line 3", "'prefill_ms'", "above 0"],
    GOOD.replace("512,0,30", "512,0,-3"): ["line 3", "'prefill_ms'", "-0.003 s"],
    GOOD.replace("512,0,30", "512,0,"): ["line 3", "'prefill_ms'", "no value"],
    GOOD.replace("512,0,30", "512,0,3O"): ["line 3", "'prefill_ms'", "'3O'"],
    GOOD.replace("512,0,30", "512.5,0,30"): ["line 3", "'new_tokens'", "512.5"],
    GOOD.replace("512,0,30", "0,0,30"): ["line 3", "'new_tokens'", "from 1"],
    GOOD.replace("512,0,30", "512,-1,30"): ["line 3", "'cached_tokens'", "from 0"],
    GOOD.replace("512,0,30", "512,0,30,1"): ["line 3", "4 cells", "3 columns"],
    GOOD.replace("512,0,30", "4096,0,30"): ["line 3", "4096 new tokens", "line 2 already"],
    GOOD.replace("4096,8192,120", "4096,8192,39"): [
        "line 5", "'prefill_ms'", "0.039 s at 4096", "0.04 s at 512", "line 4",
    ],
    "new_tokens,new_tokens,prefill_s\n1,1,1\n": ["two columns 'new_tokens'"],
    "new_tokens,prefill_s\n": ["0 rows"],
    "": ["0 rows"],
    'new_tokens,prefill_s\n1,"x': ["line 2"],
}  # fmt: skip


@pytest.mark.parametrize("text", BAD_TABLES)
def test_a_fault_of_a_table_is_told_by_row_and_column(tmp_path: Path, text: str) -> None:
    path = table(tmp_path, text)
    with pytest.raises(ScenarioError) as caught:
        read_prefill_table(path, PLAIN)
    message = str(caught.value)
    assert all(word in message for word in (str(path), *BAD_TABLES[text])), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", ["array of objects"]),
        ("{}", ["array of objects"]),
        ("[", ["not usable JSON"]),
        ("[]", ["0 rows"]),
        ('[{"new_tokens": 1, "prefill_s": true}]', ["row 1", "'prefill_s'", "True"]),
        ('[{"new_tokens": 1, "prefill_s": NaN}]', ["row 1", "'prefill_s'", "nan"]),
        ('[{"new_tokens": 1, "prefill_s": [1]}]', ["row 1", "[1]"]),
        ('[{"new_tokens": 1, "prefill_s": 1}, {"new_tokens": 2}]', ["row 2", "no value"]),
    ],
)
def test_a_fault_of_a_json_table_is_told(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ScenarioError) as caught:
        read_prefill_table(table(tmp_path, text, "t.json"), PLAIN)
    assert all(word in str(caught.value) for word in words), caught.value


def test_what_asks_for_unknown_columns_or_rows_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path, GOOD)
    with pytest.raises(ScenarioError, match="no column 'prefil_ms' to map: did you mean"):
        TableReading("measured", "x", {"prefil_ms": "t"}, {})
    for where, words in (({"gpu": "a"}, "no column 'gpu'"), ({"new_tokens": "7"}, "no row with")):
        with pytest.raises(ScenarioError, match=words):
            read_prefill_table(path, TableReading("measured", "x", {}, where))
    with pytest.raises(ScenarioError, match="no column 'hits'"):
        read_prefill_table(path, TableReading("measured", "x", {"cached_tokens": "hits"}, {}))
    with pytest.raises(ScenarioError, match=r"\.csv or \.json"):
        read_prefill_table(table(tmp_path, GOOD, "t.tsv"), PLAIN)
    wrong = GOOD.replace("prefill_ms", "prefill_ms,provenance").replace(",30", ",30,guessed")
    wrong = "\n".join(
        f"{line},measured" if line.count(",") == 2 else line for line in wrong.split()
    )
    with pytest.raises(ScenarioError, match="'guessed' is none of published"):
        read_prefill_table(table(tmp_path, wrong), PLAIN)


def described(output: Path) -> list[str]:
    return [
        "--model", "m", "--hardware", "8xTest", "--gpus", "8", "--engine", "sglang",
        "--engine-version", "0.5.9", "--provenance", "measured", "--source", "lab, 3 May",
        "--output", str(output),
    ]  # fmt: skip


def test_a_table_becomes_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefill, output = table(tmp_path, GOOD), tmp_path / "out.json"
    decode = table(
        tmp_path, "batch,context_tokens,tpot_ms\n1,128,5\n1,9000,6\n8,128,7\n8,9000,9\n", "d.csv"
    )
    arguments = ["profile", "import", "table", str(prefill), "--decode", str(decode)]
    assert main([*arguments, *described(output), "--json", "--notes", "a note"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["calibration"] is None
    assert told["notes"] == "a note"
    assert told["prefill"]["cached_tokens"] == [0, 8192]
    assert told["decode"]["max_batch"] == 8
    profile = load_profile(output)
    assert (profile.name, profile.model, profile.engine_version) == ("out", "m", "0.5.9")
    assert profile.prefill_s(512, 8192) == pytest.approx(0.04)
    assert profile.decode_step_s(8, 9000) == pytest.approx(0.009)
    before = output.read_bytes()
    assert main([*arguments, *described(output), "--max-batch", "4"]) == 2
    assert "exists; give another --output, or --force" in capsys.readouterr().err
    assert output.read_bytes() == before
    assert main([*arguments, *described(output), "--max-batch", "4", "--force"]) == 0
    assert load_profile(output).decode_max_batch == 4
    assert "decode: batches of 1 to 8, at most 4 (measured)" in capsys.readouterr().out
    assert main([*arguments, *described(output), "--max-batch", "0", "--force"]) == 2
    assert "'decode.max_batch'" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.csv", "out.json", "t.csv"]


def test_a_table_is_calibrated_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = "".join(f"{new},{1e-4 * new:.6f}\n" for new in (512, 1024, 8192, 65_536))
    truth = "".join(f"{new},{0.4 + 1.2e-4 * new:.6f}\n" for new in (1024, 8192, 65_536))
    header, output = "new_tokens,prefill_s\n", tmp_path / "out.json"
    arguments = ["profile", "import", "table", str(table(tmp_path, header + tool)), "--calibrate",
                 str(table(tmp_path, header + truth, "lab.csv"))]  # fmt: skip
    assert main([*arguments, *described(output)]) == 0
    said = capsys.readouterr().out
    assert "calibration: T = 0.4 s + 1.2 x time, within 0.0%" in said
    assert "8192 new, 0 cached" in said
    profile = load_profile(output)
    assert profile.prefill_s(512) == pytest.approx(0.4 + 1.2e-4 * 512, rel=1e-3)
    assert {point.provenance for point in profile.prefill_points} == {"modelled"}
    assert "fitted to 3 points of lab.csv" in profile.prefill_points[0].source


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--max-batch", "4"], "--decode TABLE"),
        (["--column", "prefill_ms"], "'=' and what"),
        (["--column", "prefil_ms=t"], "did you mean 'prefill_ms'"),
        (["--where", "gpu=a"], "no column 'gpu'"),
        (["--decode", "nowhere.csv"], "nowhere.csv does not exist"),
        (["--calibrate", "nowhere.csv"], "nowhere.csv does not exist"),
        (["--gpus", "0"], "'gpus_per_instance'"),
        (["--name", ""], "'name'"),
        (["--output", "nowhere/out.json"], "folder nowhere"),
    ],
)
def test_wrong_usage_has_status_2_and_writes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    prefill = table(tmp_path, GOOD)
    arguments = ["profile", "import", "table", str(prefill), *described(Path("out.json"))]
    assert main([*arguments, *extra]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_show_tells_range_provenance_and_decode(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(PROFILES / "prfaas-1t-8xh200.json")
    assert main(["profile", "show", path]) == 0
    said = capsys.readouterr().out
    assert "prefill: 1 to 131072 new tokens, no cached axis; 0.44 to 7.46 s" in said
    assert "log_log; 1 stand_in, 4 published, 2 derived" in said
    assert main(["profile", "show", path, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["decode"]["max_batch"] == 20
    assert main(["profile", "show", str(PROFILES / "ring-2.5-1t-8xh200.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decode"] is None
    assert main(["profile", "show", "nowhere.json"]) == 2
    assert "nowhere.json does not exist" in capsys.readouterr().err


def test_a_files_text_does_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((PROFILES / "prfaas-1t-8xh200.json").read_text())
    document |= {"name": "a\x1b[31mb", "notes": "one\ntwo\x07\u202e"}
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document))
    assert main(["profile", "show", str(path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("a?[31mb: prfaas-1t on 8xH200")
    assert said.endswith("notes: one two??\n")
