"""Tests for `make gpu-trial` without a GPU: plan, pieces, and results of interrupted runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

from examples.real_model.gsm8k_reward import reward_func
from openrlhf.config.options import parse_config
from tests.config.commands import ROOTS
from tests.config.conftest import gpu_machine  # noqa: F401
from tests.gpu import pieces
from tests.gpu.gsm8k import HELD_OUT, PROMPTS, command, mirrored, read_rows, stand_ins, summarize
from tests.gpu.trial import Limits, Place, calls, describe, kit_files, parse, receive
from tests.ranks import ROOT

MIB = pieces.MIB

# ---- the plan


def test_time_is_divided_among_the_parts_and_some_is_reserved() -> None:
    assert Limits().budget() == {"copies": 2, "check": 5, "grpo": 5}
    assert Limits(minutes=30, per_command=8).budget() == {"copies": 4, "check": 8, "grpo": 8}


def test_plan_lists_a_call_per_piece_and_then_both_parts() -> None:
    made = [pieces.Piece(folder=Path(name), nbytes=50 * MIB) for name in ("01", "02")]
    sequence = calls(made, Limits(), tree_nbytes=8 * MIB)
    assert [call.mib for call in sequence] == [58, 58, 8, 8]
    parts = []
    for call in sequence:
        words = call.command.split()
        assert words[:3] == ["python3", "-m", "tests.gpu.trial"]
        parts.append(parse(words[3:]).part)
        assert call.command in describe(sequence, Limits())
    assert parts == ["receive", "receive", "check", "grpo"]


# ---- pieces


def random_file(path: Path, nbytes: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(nbytes))
    return path


def a_kit(folder: Path) -> list[tuple[str, Path]]:
    """Return a large archive and a text file, with their names in the kit."""
    wheel = random_file(folder / "wheels/large-1-py3-none-any.whl", 3 * MIB)
    (folder / "gsm8k").mkdir()
    (folder / "gsm8k/train.jsonl").write_text('{"question": "?"}\n' * 10_000)
    assert dict(kit_files(folder / "wheels", folder)) == {
        "wheels/large-1-py3-none-any.whl": wheel,
        "data/gsm8k/train.jsonl": folder / "gsm8k/train.jsonl",
    }
    return list(kit_files(folder / "wheels", folder))


def test_pieces_fit_the_size_limit_and_join_in_any_order(tmp_path: Path) -> None:
    kit = a_kit(tmp_path)
    made = pieces.pack(kit, tmp_path / "pieces", 2 * MIB)
    assert len(made) == 2 and all(piece.nbytes <= 2 * MIB for piece in made)
    store = tmp_path / "store"
    assert pieces.receive(made[1].folder, store) == ["part01"]
    assert pieces.receive(made[0].folder, store) == []
    pieces.unpack(store, tmp_path / "there")
    for name, path in kit:
        assert (tmp_path / "there" / name).read_bytes() == path.read_bytes()


def test_damaged_or_foreign_pieces_are_rejected(tmp_path: Path) -> None:
    made = pieces.pack(a_kit(tmp_path), tmp_path / "pieces", 2 * MIB)
    store = tmp_path / "store"
    pieces.receive(made[0].folder, store)
    part = made[1].folder / "part02"
    part.write_bytes(b"x" + part.read_bytes()[1:])
    with pytest.raises(pieces.DamagedPiece, match="part02 is damaged"):
        pieces.receive(made[1].folder, store)
    other = pieces.pack(
        [("a.whl", random_file(tmp_path / "a.whl", MIB))], tmp_path / "other", 2 * MIB
    )
    with pytest.raises(pieces.DamagedPiece, match="another pack"):
        pieces.receive(other[0].folder, store)


def test_working_tree_that_leaves_no_room_for_a_piece_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too little room"):
        pieces.pack([], tmp_path / "pieces", MIB // 2)


def test_wheels_and_an_installed_folder_are_installed_together(tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    with ZipFile(wheels / "small-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small.py", "WORD = 1\n")
        wheel.writestr(
            "small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n"
        )
        wheel.writestr(
            "small-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("small-1.0.dist-info/RECORD", "")
    (wheels / "model-1.0-py3-none-any.whl").write_bytes(b"not installed")
    (tmp_path / "ready.py").write_text("WORD = 2\n")
    with tarfile.open(wheels / "site.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "ready.py", "ready.py")
    pieces.install(wheels, site, skip=("model",))
    code = "import small, ready; print(small.WORD, ready.WORD)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
    )
    assert done.stdout == b"1 2\n"


def test_kit_is_unpacked_when_the_last_piece_is_received(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = [("notes/a.txt", tmp_path / "a.txt")]
    (tmp_path / "a.txt").write_text("hello")
    [piece] = pieces.pack(kit, tmp_path / "pieces", 2 * MIB)
    place = Place(store=tmp_path / "store", output=tmp_path)
    receive(place, piece.folder)
    assert (place.kit / "notes/a.txt").read_text() == "hello"
    assert "unpacked" in capsys.readouterr().out


def test_trial_needs_only_the_standard_library_until_packages_are_installed() -> None:
    code = (
        "import sys; before = set(sys.modules); import tests.gpu.trial; "
        "print(*{n.split('.')[0] for n in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["tests"]


# ---- GRPO on GSM8K


def row(number: int, reward: float) -> dict[str, float]:
    return {
        "time": 200.0 + 5 * number,
        "train/reward": reward,
        "train/score": reward / 2,
        "train/logprob_gap_mean": 0.01,
        "timing/step_total": 5.0,
        "timing/tokens_per_second": 1000.0 + number,
    }


def test_result_of_a_killed_run_contains_the_completed_steps(tmp_path: Path) -> None:
    rows = [row(number, number / 10) for number in range(10)]
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"time": 190.0, "eval/eval_gsm8k_pass1": 0.02})]
    lines += [json.dumps(each) for each in rows]
    path.write_text("\n".join(lines) + '\n{"time": 3, "trai')
    result = summarize(read_rows(path), began=100.0)
    assert result["steps"] == 10 and result["held_out_solved"] == [0.02]
    assert result["seconds_to_first_step"] == 100 and result["seconds_per_step"] == 5
    assert result["tokens_per_second"] == 1006 and result["largest_gap"] == 0.01
    assert result["reward_of_first_and_last_steps"] == [0.2, 0.7]
    assert summarize([], began=0.0) == {"steps": 0, "curve": [], "held_out_solved": []}


def test_metrics_are_copied_while_a_run_continues(tmp_path: Path) -> None:
    source, target = tmp_path / "run.jsonl", tmp_path / "copy.jsonl"
    with mirrored(source, target):
        source.write_text("1\n")
        end = time.monotonic() + 30
        while not target.exists() and time.monotonic() < end:
            time.sleep(0.05)
        assert target.read_text() == "1\n"
        source.write_text("1\n2\n")
    assert target.read_text() == "1\n2\n"


@pytest.mark.parametrize("rehearsal", [True, False])
def test_flags_of_the_run_are_accepted_on_one_gpu(
    rehearsal: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpu_machine: Callable[..., None],  # noqa: F811
) -> None:
    gpu_machine(1, flash_attention=False)
    monkeypatch.chdir(ROOT)
    model, data = stand_ins(tmp_path, None, None)
    words = command(model, data, tmp_path, rehearsal=rehearsal)[3:]
    config = parse_config(ROOTS["train_ppo_ray"], words, command="train_ppo_ray")
    assert config.data.prompt_dataset == str(data / PROMPTS)
    assert config.train.batch_size == (4 if rehearsal else 256)


def test_rehearsal_uses_the_first_problems_of_the_data(tmp_path: Path) -> None:
    for path in (PROMPTS, HELD_OUT):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("1\n2\n3\n4\n5\n")
    model, data = stand_ins(tmp_path / "small", "a model", tmp_path)
    assert model == "a model" and (data / HELD_OUT).read_text() == "1\n2\n"


@pytest.mark.parametrize(
    ("response", "reward", "score"),
    [
        ("2 + 2 = 4\n#### 4", 1.0, 1.0),
        ("#### 5\n#### $4.00", 1.0, 1.0),
        ("#### 5", 0.1, 0.0),
        ("The answer is 4", 0.0, 0.0),
        ("#### ", 0.0, 0.0),
        ("#### ,", 0.1, 0.0),
    ],
)
def test_reward_teaches_the_form_and_the_score_counts_only_right_answers(
    response: str, reward: float, score: float
) -> None:
    result = reward_func(["2+2?" + response], ["2+2?"], ["Add them.\n#### 4"])
    assert result == {"rewards": [reward], "scores": [score]}
