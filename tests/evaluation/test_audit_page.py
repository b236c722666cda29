"""The page shows texts and no labels, runs no text, and what it exports is what the reader reads."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from audit_samples import NASTY, note, run

from jaxguard.evaluation.audit import AuditError, digest, read_annotations
from jaxguard.evaluation.audit_page import FOLDED, read_ids, write_audit_page
from jaxguard.evaluation.pages import script
from jaxguard.types import Step, Trajectory

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
CODE = re.compile(r"<script>(.*?)</script>", re.DOTALL)
BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium") or shutil.which("google-chrome")


def runs(count: int = 5) -> dict[str, Trajectory]:
    made = [run(f"r{i}-ROGUE", first=i % 4) for i in range(count)]
    return {own.id: own for own in made}


def page(folder: Path, trajectories: dict[str, Trajectory], **more: Any) -> str:
    write_audit_page(folder / "page.html", trajectories, **more)
    return (folder / "page.html").read_text(encoding="utf-8")


def island(text: str) -> dict[str, Any]:
    (found,) = DATA.findall(text)
    return json.loads(found)


def order(text: str) -> list[str]:
    return [own["trajectory"] for own in island(text)["runs"]]


def unlabelled(own: Trajectory) -> Trajectory:
    steps = tuple(dataclasses.replace(step, hazard=None, thought="I will go rogue") for step in own.steps)
    more = {"group": "z", "source": "z", "metadata": {"kind": "rogue"}}
    return dataclasses.replace(own, steps=steps, unsafe=None, first_hazard=None, timing=False, **more)


def test_the_page_does_not_depend_on_labels(tmp_path: Path) -> None:
    labelled = runs()
    blank = {name: unlabelled(own) for name, own in labelled.items()}
    assert page(tmp_path, labelled) == page(tmp_path, dict(reversed(blank.items())))


def test_ids_are_in_the_data_alone(tmp_path: Path) -> None:
    steps = (Step("t", {}, "0"),)  # those of `runs` name the run
    named = {
        name: dataclasses.replace(unlabelled(own), instruction="Do it.", steps=steps) for name, own in runs().items()
    }
    text = page(tmp_path, named)
    assert sorted(order(text)) == sorted(named)
    assert "ROGUE" not in DATA.sub("", text)


def test_order_and_sample_come_from_the_seed(tmp_path: Path) -> None:
    found = runs(40)
    all_of_them = order(page(tmp_path, found, seed=1))
    assert sorted(all_of_them) == sorted(found)
    assert all_of_them != list(found)
    assert order(page(tmp_path, found, seed=1, sample=7)) == all_of_them[:7]
    assert order(page(tmp_path, found, seed=2)) != all_of_them
    only = {"r3-ROGUE", "r8-ROGUE"}
    assert order(page(tmp_path, found, seed=1, only=only)) == [name for name in all_of_them if name in only]


def test_progress_is_kept_by_content_and_annotator(tmp_path: Path) -> None:
    found = runs()
    key = island(page(tmp_path, found))["key"]
    assert island(page(tmp_path, found))["key"] == key
    changed = found | {"r0-ROGUE": dataclasses.replace(found["r0-ROGUE"], instruction="else")}
    others = [(changed, {}), (found, {"annotator": "ben"}), (found, {"sample": 2}), (found, {"seed": 3})]
    assert len({key, *(island(page(tmp_path, own, **more))["key"] for own, more in others)}) == 5


def test_foreign_text_stays_text(tmp_path: Path) -> None:
    """In the page, in the data and in ids; the policy lets the page's own script run and no other."""
    steps = (
        Step(NASTY, {NASTY: NASTY, "n": [NASTY]}, "0", observation=NASTY),
        Step("t", None, "1", raw_arguments=NASTY, observation=NASTY * 40, parallel=True),
        Step("t", {}, "2", observation=NASTY * 40),
    )
    own = Trajectory(NASTY, NASTY, steps, final_observation=NASTY)
    text = page(tmp_path, {NASTY: own}, annotator=NASTY)
    assert island(text)["runs"] == [{"trajectory": NASTY, "digest": digest(own), "steps": 3}]
    assert island(text)["annotator"] == NASTY
    assert text.count("<script") == 2
    assert "alert(1)<" not in text
    assert "<b>&" not in text
    assert "\u202e" not in text
    (code,) = CODE.findall(text)
    digest_of_code = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].replace("&#39;", "'").endswith(f"; script-src 'sha256-{digest_of_code}'")
    assert policy[1].startswith("default-src ")
    assert not re.search(r"(src|href)=", text.replace("script-src", ""))


def test_long_texts_are_folded_and_whole(tmp_path: Path) -> None:
    long, lines = "word " * FOLDED, "\n".join(f"line {i}" for i in range(30))
    steps = (Step("t", {"a": lines, "b": "short"}, "0", observation=long),)
    text = page(tmp_path, {"a": Trajectory("a", "Do.", steps)})
    assert text.count("<details>") == 2
    assert f"<pre>{long}</pre>" in text
    assert f"<pre>{lines}</pre>" in text
    assert "<pre>short</pre>" in text


def test_an_argument_cannot_look_like_the_next(tmp_path: Path) -> None:
    steps = (Step("t", {"to": "a@x\npath: /etc", "path": "/tmp"}, "0"),)
    text = page(tmp_path, {"a": Trajectory("a", "Do.", steps)})
    assert re.findall(r"<dt>(.*?)</dt>", text) == ["to", "path"]


def test_misuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="sample: got 0, expected at least 1"):
        page(tmp_path, runs(), sample=0)
    with pytest.raises(AuditError, match="'x' is none of the 5 trajectories"):
        page(tmp_path, runs(), only={"x"})
    (tmp_path / "ids.jsonl").write_text('{"trajectory": "a"}\n\n{"id": "b"}\n')
    with pytest.raises(AuditError, match=r"ids\.jsonl, line 3: trajectory: got None, expected an id"):
        read_ids(tmp_path / "ids.jsonl")
    (tmp_path / "ids.jsonl").write_text("[1]\n")
    with pytest.raises(AuditError, match=r"ids\.jsonl, line 1: "):
        read_ids(tmp_path / "ids.jsonl")


# The script, without a page


def node(expression: str, folder: Path, **values: Any) -> Any:
    """What an expression over the script's ``AuditFile`` gives."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    code = f"{script('audit_page.js')[0]}\nconst v = {json.dumps(values)};\n"
    code += (
        f"const f = () => {{ {expression} }};\nlet r; try {{ r = f(); }} catch (e) {{ r = {{error: e.message}}; }}\n"
    )
    (folder / "run.cjs").write_text(code + "console.log(JSON.stringify(r));", encoding="utf-8")
    done = subprocess.run(["node", folder / "run.cjs"], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


MARKS = [
    {"status": "labelled", "first_hazard": 2, "comment": NASTY},
    {"status": "", "first_hazard": None, "comment": "not marked"},
    {"status": "labelled", "first_hazard": None, "comment": ""},
    {"status": "unsure", "first_hazard": None, "comment": "a\nb"},
    {"status": "labelled", "first_hazard": 0, "comment": ""},
]


def test_an_exported_file_is_read_here_and_there(tmp_path: Path) -> None:
    found = runs()
    data = island(page(tmp_path, found))
    text = node("return AuditFile.write(v.data, v.marks, 'anna');", tmp_path, data=data, marks=MARKS)
    (tmp_path / "x.jsonl").write_text(text, encoding="utf-8")
    labels = read_annotations(tmp_path / "x.jsonl")
    marked = [(name, mark) for name, mark in zip(order(page(tmp_path, found)), MARKS, strict=True) if mark["status"]]
    assert list(labels.annotations.values()) == [
        note(found[name], "unsure" if mark["status"] == "unsure" else mark["first_hazard"], "anna", mark["comment"])
        for name, mark in marked
    ]
    # The reader's own writer makes lines that the page takes.
    ours = "".join(own.to_line() for own in labels.annotations.values())
    back = node("return [...AuditFile.read(v.data, v.text, '')];", tmp_path, data=data, text="\ufeff" + ours)
    assert back == [[i, mark | {"annotator": "anna"}] for i, mark in enumerate(MARKS) if mark["status"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_hazard": 4}, "first_hazard: got 4, expected a step of the run, or null"),
        ({"first_hazard": 1, "status": "unsure"}, "first_hazard: got 1, expected a step of the run, or null"),
        ({"status": "x"}, 'status: got "x", expected labelled or unsure'),
        ({"digest": "x"}, 'digest: got "x", expected that of the run on this page'),
        ({"trajectory": "x"}, 'trajectory: got "x", expected a run of this page'),
        ({"annotator": "ben"}, 'annotator: got "ben", expected anna'),
        ({"comment": None}, "comment: got null, expected a text"),
        ({"more": 1}, 'field: got "more", expected one of jaxguard_annotation'),
        ({"jaxguard_annotation": 2}, "jaxguard_annotation: got 2, expected 1"),
    ],
)
def test_the_page_takes_no_broken_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    found = runs()
    own = next(iter(found.values()))
    line = json.loads(note(own, 1).to_line()) | change
    text = "\n" + json.dumps(line)
    read = "return [...AuditFile.read(v.data, v.text, 'anna')];"
    assert node(read, tmp_path, data=island(page(tmp_path, found)), text=text)["error"].startswith(f"line 2: {message}")


# The page in a browser

DRIVER = """
const keep = (text) => { document.title = encodeURIComponent(text); };
URL.createObjectURL = (blob) => { blob.text().then(keep); return "#"; };
const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
const click = (id) => document.getElementById(id).click();
document.querySelector("article:not([hidden])").querySelectorAll("button.mark")[2].click();
press("ArrowRight"); press("n");
click("next"); click("unsure");
click("open"); press("n"); press("x"); press("ArrowLeft"); press("ArrowLeft");
document.getElementById("annotator").value = "anna"; document.getElementById("annotator").oninput();
document.getElementById("comment").value = "hm"; document.getElementById("comment").oninput();
click("export");
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_marking_and_exporting_in_a_browser(tmp_path: Path) -> None:
    """The page as it is comes to life under its policy; driven by a second script, it exports what was marked."""
    found = runs()

    def shown(text: str) -> str:
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        address = (tmp_path / "page.html").as_uri()
        done = subprocess.run(
            [str(BROWSER), *options, "--virtual-time-budget=2000", "--dump-dom", address],
            capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip
        return done.stdout

    text = page(tmp_path, found)
    alive = shown(text)
    assert '<span id="place">Run 1 of 5</span>' in alive
    assert "5 without a mark" in alive
    blocked = shown(text.replace('"use strict";', '"use strict"; // changed'))
    assert "5 without a mark" not in blocked

    free = re.sub(r"<meta http-equiv[^>]*>", "", text).replace("</main>", f"<script>{DRIVER}</script></main>")
    driven = shown(free)
    assert '<span id="place">Run 2 of 5</span>' in driven
    title = re.search("<title>(.*?)</title>", driven)
    assert title is not None
    (tmp_path / "x.jsonl").write_text(unquote(title[1]), encoding="utf-8")
    first, second, third, *_ = order(text)
    assert list(read_annotations(tmp_path / "x.jsonl").annotations.values()) == [
        note(found[first], 2),
        note(found[second], None, comment="hm"),
        note(found[third], "unsure"),
    ]


def test_nothing_but_an_audit_page_is_overwritten(tmp_path: Path) -> None:
    runs = {"a": run("a", first=1)}
    page = tmp_path / "page.html"
    assert write_audit_page(page, runs) == write_audit_page(page, runs) == 1
    precious = tmp_path / "trajectories.jsonl"
    precious.write_text("precious")
    for path in (precious, tmp_path):
        with pytest.raises(AuditError, match="is there and is no audit page; nothing was overwritten"):
            write_audit_page(path, runs)
    assert precious.read_text() == "precious"


def test_a_page_without_trajectories_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="there is none to be shown"):
        write_audit_page(tmp_path / "page.html", {"a": run("a")}, only=[])
    assert not list(tmp_path.iterdir())
